"""A stand-in for vLLM 0.26: the surface that the worker uses, with its own checks, and ways to misbehave.

A completion token is (the prompt's sum + its place in the completion) % 97: `complete` in the tests says the same.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from vllm.misbehaviour import asked, note, run_engine_core

print("vLLM prints on stdout when it is imported")

ENGINE_ARGUMENTS = {
    str: {"model", "load_format", "generation_config", "dtype", "logprobs_mode"},
    bool: {"skip_tokenizer_init", "enable_prefix_caching", "disable_log_stats", "enforce_eager"},
    int: {
        *{"seed", "max_model_len", "max_num_seqs", "block_size"},
        *{"kv_cache_memory_bytes", "num_gpu_blocks_override"},
    },
    float: {"gpu_memory_utilization"},
    dict: {"compilation_config"},
}


class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, stop_token_ids, stop, detokenize, logprobs, **chosen):
        types = {
            "temperature": float,
            "top_k": int,
            "top_p": float,
            "min_p": float,
            "repetition_penalty": float,
        }
        assert {name: type(value) for name, value in chosen.items()} == types | {"min_tokens": int}
        assert chosen["top_k"] >= 0
        assert 0 < chosen["top_p"] <= 1
        assert ignore_eos is True
        assert detokenize or not stop
        self.chosen = chosen
        self.max_tokens, self.stop_token_ids, self.stop, self.logprobs = (
            max_tokens,
            stop_token_ids,
            stop,
            logprobs,
        )


class LLM:
    def __init__(self, model, **arguments):
        for name, value in {"model": model, **arguments}.items():
            if name not in ENGINE_ARGUMENTS[type(value)]:
                raise TypeError(f"{name}={value!r}")
        json.loads(Path(model, "config.json").read_text())
        self.arguments = arguments
        self.forgotten = True
        start_misbehaviour()
        os.write(1, b'{"event": "a line on the descriptor of stdout"}\n')
        note("start", {"model": model, **arguments})
        method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        engine_core = multiprocessing.get_context(method).Process(target=run_engine_core, daemon=True)
        engine_core.start()
        note("engine_core", engine_core.pid)
        cache = SimpleNamespace(block_size=16, num_gpu_blocks=1000, enable_prefix_caching=True)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))

    def reset_prefix_cache(self):
        note("reset", None)
        self.forgotten = True
        return not asked("busy_cache")

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert use_tqdm is False
        assert self.forgotten or not self.arguments["enable_prefix_caching"], "prompts of an earlier round"
        self.forgotten = False
        note("round", [params.max_tokens for params in sampling_params])
        note("sampling", sampling_params[0].chosen)
        print("vLLM prints on stdout in a round")
        round_misbehaviour()
        pairs = zip(prompts, sampling_params, strict=True)
        return [self.answer(prompt["prompt_token_ids"], params) for prompt, params in pairs]

    def answer(self, prompt_ids, params):
        if len(prompt_ids) + params.max_tokens > self.arguments["max_model_len"]:
            raise ValueError("longer than the maximum model length")
        assert not (params.stop and self.arguments["skip_tokenizer_init"])
        ids, reason, stop_reason = [], "length", None
        for place in range(params.max_tokens - asked("short")):
            ids.append((sum(prompt_ids) + place) % 97)
            found = [text for text in params.stop if text in "".join(map(chr, ids))]
            if len(ids) > params.chosen["min_tokens"] and (ids[-1] in params.stop_token_ids or found):
                reason, stop_reason = "stop", found[0] if found else ids[-1]
                break
        metrics = None if self.arguments["disable_log_stats"] else build_metrics()
        # Of each token, its own and, by rank, perhaps others'.
        logprobs = None if params.logprobs is None else [{i: SimpleNamespace(logprob=-i / 97)} for i in ids]
        completion = SimpleNamespace(
            token_ids=ids, finish_reason=reason, stop_reason=stop_reason, logprobs=logprobs
        )
        return SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[completion], metrics=metrics)


def build_metrics():
    now_s = time.monotonic()
    return SimpleNamespace(scheduled_ts=now_s - 2e-6, first_token_ts=now_s - 1e-6, last_token_ts=now_s)


def start_misbehaviour():
    if asked("crash_at_start"):
        raise RuntimeError("something is amiss with the model")
    if asked("no_memory"):
        print(
            "(EngineCore pid=12) ERROR 07-31 12:00:00 [core.py:1] ValueError: Free memory on device is less",
            flush=True,
        )
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    if asked("hang_at_start"):
        print("Capturing CUDA graphs:  50%|     |\rCapturing CUDA graphs:  60%|    |", flush=True)
        time.sleep(600)
    if asked("exit_at_start"):
        os._exit(3)


def round_misbehaviour():
    if asked("die_in_round"):
        os.kill(os.getpid(), signal.SIGKILL)
    if asked("raise_in_round"):
        raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    if asked("hang_in_round"):
        time.sleep(600)


note("path", sys.path)
