"""What vLLM's engine and its worker process are given for a plan: the same workload within the same memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cbexp.config import CompileConfig
from cbexp.drivers.inputs import DriverInputs
from cbexp.drivers.peer_sampling import vllm_takes_processed
from cbexp.drivers.vllm.model_folder import find_model_folder, write_config_folder
from cbexp.drivers.vllm.python import find_python, find_pythonpath
from cbexp.drivers.vllm.start import VllmConfig
from cbexp.engine.requests import RequestLimits
from cbexp.engine.sizing import measure_need
from cbexp.engine.support import read_positions
from cbexp.engine.types import GREEDY
from cbexp.errors import ConfigError
from cbexp.model.memory import total_memory_bytes
from cbexp.planning.cache_sizing import full_lengths, group_lengths, round_settings
from cbexp.planning.plan import RunPlan

# compile.mode -> arguments of vLLM's `LLM`.
COMPILE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "default": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "cuda_graph": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled_cuda_graph": {},
}
LENGTH_MULTIPLE = 64  # of max_model_len, so that like workloads share compiled code
UTILIZATION_DIGITS = 4
# For a machine without a network, and without packages that vLLM would take up by itself; the user's own go before.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def build_vllm_config(inputs: DriverInputs) -> VllmConfig:
    """Return what `VllmDriver` needs to serve rounds of the prompts.

    Raises:
        ConfigError: the interpreter or a folder of its path is not there, or the longest request exceeds the cache.
        ModelError: the model's folder is not there and cannot be fetched.
    """
    plan = inputs.plan
    if inputs.log_path is None:
        raise ValueError("vLLM needs a log_path")
    return VllmConfig(
        python=find_python(plan.config.driver),
        environment=_build_environment(plan, os.environ),
        log_path=inputs.log_path.absolute(),
        start_timeout_s=plan.config.driver.start_timeout_s,
        engine=_engine_arguments(plan, inputs.prompt_lengths),
        device_type=plan.device.type,
        settings=inputs.settings,
        request_limits=RequestLimits(
            vocab_size=int(plan.architecture.vocab_size),
            positions=read_positions(plan.architecture),
            max_stored_tokens=None,
            reads_text=inputs.tokenizer is not None,
            has_own_sampling=False,
        ),
        model_defaults=getattr(inputs.model, "generation_config", None),
    )


def _engine_arguments(plan: RunPlan, prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: its own defaults, but for what the workload and the comparison fix."""
    config, sampling = plan.config, plan.settings.sampling or GREEDY
    arguments: dict[str, Any] = {
        **_model_arguments(plan),
        "skip_tokenizer_init": not sampling.stop_strings,
        "generation_config": "vllm",
        "dtype": str(plan.dtype).removeprefix("torch."),
        "seed": config.seed % 2**32,
        "max_model_len": _max_model_len(plan, prompt_lengths),
        "max_num_seqs": min(
            plan.max_requests_per_batch, len(prompt_lengths) * config.dataset.num_generations
        ),
        "enable_prefix_caching": plan.block_sharing,
        "disable_log_stats": not config.driver.request_times,
        **_memory_arguments(plan, prompt_lengths),
        **({} if config.compile.mode == "auto" else COMPILE_ARGUMENTS[plan.compile_mode]),
    }
    if config.cache.page_size is not None:
        arguments["block_size"] = config.cache.page_size
    if plan.settings.logprobs:
        arguments["logprobs_mode"] = f"{'processed' if vllm_takes_processed(sampling) else 'raw'}_logprobs"
    return arguments


def _model_arguments(plan: RunPlan) -> dict[str, Any]:
    config = plan.config
    if config.model.init == "random":
        if config.sampling.stop_strings:
            raise ConfigError(
                "sampling.stop_strings do not work with driver=vllm model.init=random, whose folder has no tokenizer: "
                "take sampling.stop_token_ids, or the model's own weights."
            )
        parent = _cache_folder(config.compile) / "vllm_models"
        folder = write_config_folder(parent, config.model, plan.architecture, plan.dtype)
        return {"model": str(folder), "load_format": "dummy"}
    trust = {"trust_remote_code": True} if config.model.trust_remote_code else {}
    return {"model": str(find_model_folder(config.model)), "load_format": "auto", **trust}


def _max_model_len(plan: RunPlan, prompt_lengths: Sequence[int]) -> int:
    longest = max(full_lengths(plan, prompt_lengths))
    if plan.cache_tokens is not None and longest > plan.cache_tokens:
        raise ConfigError(
            f"cache.num_tokens={plan.cache_tokens} is too small: the longest request has {longest} tokens, and vLLM "
            "starts with a cache that holds it only."
        )
    bounds = (read_positions(plan.architecture).count, plan.cache_tokens)
    rounded = math.ceil(longest / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return min(rounded, *(bound for bound in bounds if bound is not None))


def _memory_arguments(plan: RunPlan, prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """On a GPU a cache of as many pages as asked for, or the share of its memory that `cache` gives to the others too.

    There `max_memory_fraction` is of what the weights leave; vLLM's is of all, weights included.
    """
    if plan.device.type != "cuda":
        num_tokens = plan.cache_tokens
        if num_tokens is None:
            groups, settings = group_lengths(plan, prompt_lengths), round_settings(plan, prompt_lengths)
            num_tokens = measure_need(groups, plan.architecture, settings).num_blocks * plan.page_size
        return {"kv_cache_memory_bytes": num_tokens * plan.kv_bytes_per_token}
    share_of_weights = plan.weights.num_bytes / total_memory_bytes(plan.device)
    utilization = share_of_weights + plan.config.cache.max_memory_fraction * (1 - share_of_weights)
    arguments: dict[str, Any] = {"gpu_memory_utilization": round(utilization, UTILIZATION_DIGITS)}
    if plan.cache_tokens is not None:
        # One page is vLLM's own, for rows that pad a batch.
        num_pages = math.ceil(plan.cache_tokens / plan.page_size) + 1
        arguments |= {"block_size": plan.page_size, "num_gpu_blocks_override": num_pages}
    return arguments


def _build_environment(plan: RunPlan, ours: Mapping[str, str]) -> dict[str, str]:
    """Our environment, but for what leads Python to our packages; what `ENVIRONMENT` names, where we do not."""
    config = plan.config
    environment = ENVIRONMENT | {
        name: value for name, value in ours.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    if config.compile.cache_dir is not None:
        environment.setdefault("VLLM_CACHE_ROOT", str(_cache_folder(config.compile) / "vllm"))
    pythonpath = find_pythonpath(config.driver)
    if pythonpath is not None:
        environment["PYTHONPATH"] = pythonpath
    if plan.device.type == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = _visible_device(plan.device, ours)
    elif config.model.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.model.num_threads)
    return environment


def _cache_folder(config: CompileConfig) -> Path:
    if config.cache_dir is None:
        return Path(tempfile.gettempdir(), "cbexp")
    return Path(config.cache_dir).expanduser().absolute()


def _visible_device(device: torch.device, environment: Mapping[str, str]) -> str:
    """The name of the one GPU that `device` is among those that we see: vLLM takes the first that it sees."""
    index = device.index or 0
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[index] if names else str(index)
