"""The environment of a run: seeds, versions, source commit, hardware and memory."""

from __future__ import annotations

import gc
import logging
import os
import platform
import random
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import cbexp
from cbexp.engine import memory
from cbexp.gpu_state import find_gpu_processes, find_gpu_states
from cbexp.metrics import MemoryUse
from cbexp.provenance import PACKAGES, describe_source, output_of, version_of

GIB = 2**30
DEFAULT_NUM_THREADS = torch.get_num_threads()
# Only these: others may hold keys and tokens.
ENVIRONMENT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_LOGS",
    "TRITON_CACHE_DIR",
)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def quiet_libraries() -> None:
    """Silence other libraries' progress bars in logs, and the hub client's messages about retries.

    If no retry succeeds, the error that follows says what was wrong.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def limit_threads(num_threads: int | None) -> None:
    """Set the number of threads of a CPU operation in this process; None is PyTorch's default."""
    torch.set_num_threads(DEFAULT_NUM_THREADS if num_threads is None else num_threads)


def collect_environment() -> dict[str, Any]:
    """The content of environment.json: plain JSON values, None for what is missing or unknown."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "source": describe_source(Path(cbexp.__file__).parents[1]),
        "cpu": _describe_cpu(),
        "cuda": _describe_cuda() if torch.cuda.is_available() else None,
        "variables": {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ},
    }


def measure_memory(device: torch.device) -> MemoryUse:
    """Memory in use and its peaks: on the device since `reset_peak_memory`, on the host since the start."""
    peak_host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES / GIB
    if device.type != "cuda":
        return MemoryUse(None, None, None, None, peak_host_gib)
    # Of the engine's cache, which PyTorch does not know of. In a run it stays to the end: the peaks are of one time.
    held, peak_held = memory.held_bytes(device), memory.peak_held_bytes(device)
    return MemoryUse(
        allocated_gib=(torch.cuda.memory_allocated(device) + held) / GIB,
        reserved_gib=(torch.cuda.memory_reserved(device) + held) / GIB,
        peak_allocated_gib=(torch.cuda.max_memory_allocated(device) + peak_held) / GIB,
        peak_reserved_gib=(torch.cuda.max_memory_reserved(device) + peak_held) / GIB,
        peak_host_gib=peak_host_gib,
    )


def reset_peak_memory(device: torch.device) -> None:
    """Reset the device's peaks. A CPU has none."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        memory.reset_peak(device)


def release_memory() -> int:
    """Drop compiled code, collect garbage and free cached blocks, in that order. Returns device bytes still in use."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return sum(torch.cuda.memory_allocated(device) + memory.held_bytes(device) for device in devices)


def synchronize(device: torch.device) -> None:
    """Wait until the device has run all that is queued. Nothing is queued on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def _describe_cpu() -> dict[str, Any]:
    return {
        "model": _cpu_model(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
    }


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def _describe_cuda() -> dict[str, Any]:
    """`gpu_states` and `processes` are of this process's GPUs, `host_gpus` of all in the machine."""
    drivers = _query_nvidia_smi("--query-gpu=driver_version")
    devices = [_describe_gpu(index) for index in range(torch.cuda.device_count())]
    uuids = [device["uuid"] for device in devices]
    return {
        "runtime": torch.version.cuda,
        "driver": drivers[0] if drivers else None,
        "devices": devices,
        "gpu_states": find_gpu_states(uuids),
        "host_gpus": _query_nvidia_smi("--query-gpu=index,name,memory.used,memory.total"),
        "processes": find_gpu_processes(uuids),
    }


def _describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "memory_gib": properties.total_memory / GIB,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_multiprocessors": properties.multi_processor_count,
    }


def _query_nvidia_smi(query: str) -> list[str] | None:
    output = output_of("nvidia-smi", query, "--format=csv,noheader")
    return None if output is None else output.splitlines()
