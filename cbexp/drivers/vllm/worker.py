"""Runs vLLM's offline engine for `driver=vllm`: JSON lines come in by stdin and go out by what was stdout.

An interpreter of vLLM's own runs this file by its path, so that it imports nothing but vLLM and the standard library.
Whatever vLLM prints goes to stderr. When stdin ends, this process and all that it started end.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

PACKAGES = ("vllm", "torch", "transformers", "triton")
RESET_ATTEMPTS = 20
RESET_INTERVAL_S = 0.1
# What vLLM resolved -> where its configuration has it; None where a version of vLLM keeps it elsewhere.
SETTINGS = {
    "page_size": "cache_config.block_size",
    "num_blocks": "cache_config.num_gpu_blocks",
    "block_sharing": "cache_config.enable_prefix_caching",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "max_requests_per_batch": "scheduler_config.max_num_seqs",
    "max_batch_tokens": "scheduler_config.max_num_batched_tokens",
    "async_scheduling": "scheduler_config.async_scheduling",
    "max_model_len": "model_config.max_model_len",
    "compilation_mode": "compilation_config.mode.name",
    "cudagraph_mode": "compilation_config.cudagraph_mode.name",
    "attention_backend": "attention_config.backend.name",
}


class Replies:
    """Writes JSON lines to the descriptor that was stdout, which nothing else has any more."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, event: str, **values: Any) -> None:
        """Write one line; `values` are plain JSON."""
        self._file.write(json.dumps({"event": event, **values}) + "\n")
        self._file.flush()


class Commands:
    """Reads JSON lines from what was stdin on a thread, and ends the process where they do."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        stdin = os.fdopen(os.dup(0), "rb")
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        threading.Thread(target=self._read, args=(stdin,), daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Wait for the next command."""
        return self._queue.get()

    def _read(self, stdin: BinaryIO) -> None:
        for line in stdin:
            self._queue.put(json.loads(line))
        os.killpg(0, signal.SIGKILL)  # the group is vLLM's own: the parent has made it


def find_versions() -> dict[str, str | None]:
    """Versions of vLLM, of what it runs on, and of Python; None for what is not installed."""
    return {name: find_version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}


def find_version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_device() -> dict[str, Any]:
    """The kind of device that vLLM takes here, None when it finds none, and its name."""
    from vllm.platforms import current_platform

    kind = current_platform.device_type or None
    return {"device_type": kind, "device_name": current_platform.get_device_name() if kind else None}


def describe_settings(llm: Any) -> dict[str, Any]:
    """`SETTINGS` as an engine has resolved them."""
    config = llm.llm_engine.vllm_config
    return {name: find_attribute(config, path) for name, path in SETTINGS.items()}


def find_attribute(owner: Any, path: str) -> Any:
    """The plain value at a dotted path; None when there is none."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner if isinstance(owner, bool | int | float | str) else None


def build_engine(settings: dict[str, Any]) -> Any:
    """Load, compile and capture, which takes minutes."""
    from vllm import LLM

    return LLM(**settings)


def reset_prefix_cache(llm: Any) -> None:
    """Forget earlier rounds' prompts, which are this round's too; blocks in use make vLLM refuse for a moment."""
    for _ in range(RESET_ATTEMPTS):
        if llm.reset_prefix_cache():
            return
        time.sleep(RESET_INTERVAL_S)
    raise RuntimeError("vLLM could not reset its prefix cache between two rounds: blocks are still in use")


def run_round(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Submit everything at once; the clock stops when the last result is in the caller's hands.

    EOS is a matter of our stop ids alone.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    start_s = time.perf_counter()
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in command["prompts"]]
    sampling = [
        SamplingParams(max_tokens=limit, ignore_eos=True, **command["sampling"])
        for limit in command["limits"]
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    end_s = time.perf_counter()
    check_order(command["prompts"], outputs)
    return {"start_s": start_s, "end_s": end_s, "outputs": [describe_output(output) for output in outputs]}


def check_order(prompts: list[list[int]], outputs: list[Any]) -> None:
    """Outputs have no ids of ours: their order tells whose they are."""
    answered = [list(output.prompt_token_ids) for output in outputs]
    if answered != prompts:
        raise RuntimeError(
            f"vLLM answered {len(answered)} prompts that are not the {len(prompts)} asked, in order"
        )


def describe_output(output: Any) -> dict[str, Any]:
    """Times are of CLOCK_MONOTONIC, as `perf_counter` has it; None unless vLLM keeps its statistics."""
    (completion,) = output.outputs
    metrics = output.metrics
    times = {"scheduled_s": "scheduled_ts", "first_token_s": "first_token_ts", "finished_s": "last_token_ts"}
    return {
        "token_ids": [int(token_id) for token_id in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": read_logprobs(completion),
        **{name: getattr(metrics, field, None) or None for name, field in times.items()},
    }


def read_logprobs(completion: Any) -> list[float] | None:
    """Of each chosen token; None where they were not asked for."""
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [float(of_tokens[token_id].logprob) for token_id, of_tokens in pairs]


def serve(commands: Commands, replies: Replies) -> None:
    """Build one engine, and run rounds on it until asked to close."""
    settings = commands.next()["engine"]
    if importlib.util.find_spec("vllm") is None:
        replies.send("not_installed", python=sys.executable)
        return
    replies.send("importing")
    start_s = time.perf_counter()
    device = describe_device()
    replies.send("imported", versions=find_versions(), import_s=time.perf_counter() - start_s, **device)
    start_s = time.perf_counter()
    llm = build_engine(settings)
    replies.send("ready", engine_s=time.perf_counter() - start_s, settings=describe_settings(llm))
    while (command := commands.next())["command"] == "round":
        if settings["enable_prefix_caching"]:
            reset_prefix_cache(llm)
        replies.send("round", **run_round(llm, command))


def main() -> None:
    """Serve the parent."""
    # The folder of this file is no place to import from: its neighbours are cbexp's.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    replies = Replies()
    commands = Commands()
    try:
        serve(commands, replies)
    except Exception as error:  # noqa: BLE001 - sent to the parent, whatever it is; the traceback is in the log
        traceback.print_exc()
        replies.send("error", message=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
