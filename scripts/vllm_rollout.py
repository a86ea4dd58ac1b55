"""Runs rollout workloads with vLLM's offline engine and random weights; imports nothing of cbexp.

    PYTHONPATH=VLLM_SITE python scripts/vllm_rollout.py --model FOLDER --workload rollout_32.json [--workload ...]

A workload is a JSON file as `scripts/benchmark_rollouts.py` writes it: `name`, `prompt_ids` (a list of token ids for
each request), `max_new_tokens` (one a request), `max_requests_per_batch`. Prints a line `RESULT {json}` for each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# For a machine without a network, and without packages that vLLM would take up by itself.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
LENGTH_MULTIPLE = 64
PACKAGES = ("vllm", "torch", "transformers", "triton")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--workload", type=Path, action="append", required=True, help="JSON file; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup-rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    return parser.parse_args()


def read_workload(path: Path) -> dict[str, Any]:
    workload: dict[str, Any] = json.loads(path.read_text())
    return workload


def choose_settings(arguments: argparse.Namespace, workloads: list[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's own defaults, but for what the workloads and the comparison fix. One engine serves all workloads."""
    longest = max(
        len(prompt) + limit
        for workload in workloads
        for prompt, limit in zip(workload["prompt_ids"], workload["max_new_tokens"], strict=True)
    )
    return {
        "dtype": arguments.dtype,
        "max_model_len": (longest // LENGTH_MULTIPLE + 1) * LENGTH_MULTIPLE,
        "max_num_seqs": max(workload["max_requests_per_batch"] for workload in workloads),
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "enable_prefix_caching": False,
    }


def run_round(llm: Any, workload: dict[str, Any]) -> tuple[float, list[int]]:
    """Submit everything at once; seconds until the last result is here, and the tokens of each request."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    start_s = time.perf_counter()
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in workload["prompt_ids"]]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)
        for limit in workload["max_new_tokens"]
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start_s, [len(output.outputs[0].token_ids) for output in outputs]


def run_workload(llm: Any, workload: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    rounds = []
    for index in range(arguments.warmup_rounds + arguments.rounds):
        rounds.append(run_round(llm, workload))
        print(f"{workload['name']}: round {index}: {rounds[-1][0]:.3f} s", file=sys.stderr, flush=True)
    timed = rounds[arguments.warmup_rounds :]
    return {
        "workload": workload["name"],
        "wall_times_s": [wall_s for wall_s, _ in timed],
        "completion_lengths": [lengths for _, lengths in timed],
    }


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    arguments = parse_arguments()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    workloads = [read_workload(path) for path in arguments.workload]
    settings = choose_settings(arguments, workloads)
    start_s = time.perf_counter()
    import torch  # here, so that its loading counts as set-up
    from vllm import LLM

    llm = LLM(
        model=str(arguments.model),
        skip_tokenizer_init=True,
        load_format="dummy",
        generation_config="vllm",
        disable_log_stats=True,
        **settings,
    )
    facts = {
        "set_up_s": time.perf_counter() - start_s,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: find_version(name) for name in PACKAGES},
        "settings": settings,
    }
    for workload in workloads:
        print("RESULT " + json.dumps(run_workload(llm, workload, arguments) | facts), flush=True)


if __name__ == "__main__":
    main()
