"""What a plan warns of: settings that turn out to have no effect on this machine, and jobs that will take long."""

from __future__ import annotations

import math

import torch

from cbexp.config import CompileConfig, IdleSetting
from cbexp.drivers.registry import DriverKind
from cbexp.engine.types import CBSyncConfig
from cbexp.model.attention_choice import AttentionChoice
from cbexp.model.memory import WeightSize
from cbexp.planning.compile_cache import list_overriding_variables

LARGE_FOR_A_CPU_BYTES = 2**30
# Operations of such a model take microseconds: a second thread costs more than it brings.
SMALL_FOR_THREADS_BYTES = 2**25


def find_idle_buckets(settings: CBSyncConfig) -> list[str]:
    """Buckets beyond the first that holds the largest batch are never used, and of a full batch only that one is."""
    buckets, max_requests = settings.buckets or (), settings.max_requests_per_batch or 0
    first_holding = sum(bucket < max_requests for bucket in buckets)
    first_used = first_holding if settings.batch_shape == "full" else 0
    idle = [bucket for i, bucket in enumerate(buckets) if not first_used <= i <= first_holding]
    if not idle:
        return []
    shape = f"compile.batch_shape={settings.batch_shape} and batches of at most {max_requests} requests"
    return [f"compile.buckets: {', '.join(map(str, idle))} have no effect with {shape}."]


def find_idle_self_check(
    settings: CBSyncConfig, device: torch.device, dtype: torch.dtype
) -> list[IdleSetting]:
    """Eager steps of the model's own code are what others are checked against: where they run, nothing is checked.

    Fusion `auto` fuses in half precision on CUDA alone.
    """
    if settings.self_check or settings.compile_mode != "eager":
        return []
    auto_fuses = device.type == "cuda" and dtype is not torch.float32
    if settings.fusion != "none" and (settings.fusion != "auto" or auto_fuses):
        return []
    reason = "compile.mode=eager and nothing fused: nothing is checked"
    return [IdleSetting("compile.self_check", False, reason)]


def find_overridden_cache_dir(config: CompileConfig) -> list[str]:
    """A folder for compiled code that the environment's own goes before."""
    variables = list_overriding_variables()
    if not variables or config.cache_dir in (None, CompileConfig.cache_dir):
        return []
    return [
        f"compile.cache_dir={config.cache_dir} gives way to {' and '.join(variables)} of the environment."
    ]


def find_rounded_cache(num_tokens: int | None, page_size: int) -> list[str]:
    """A cache that was asked for in other than whole pages."""
    if num_tokens is None or num_tokens % page_size == 0:
        return []
    num_pages = math.ceil(num_tokens / page_size)
    pages = f"{num_pages} page{'s' if num_pages > 1 else ''} of {page_size}"
    return [f"cache.num_tokens={num_tokens} is rounded up to {num_pages * page_size:,} tokens, {pages}."]


def find_slowness(device: torch.device, weights: WeightSize, num_threads: int | None) -> list[str]:
    """A model on a CPU that is not small, or so small that threads get in each other's way."""
    if device.type != "cpu":
        return []
    if weights.num_bytes < SMALL_FOR_THREADS_BYTES and num_threads is None and torch.get_num_threads() > 1:
        return [
            f"{weights.num_parameters:,} parameters are too few for {torch.get_num_threads()} threads, which mostly "
            "wait for each other: model.num_threads=1 is faster."
        ]
    if weights.num_bytes < LARGE_FOR_A_CPU_BYTES:
        return []
    return [
        f"{weights.num_parameters:,} parameters on a CPU: a round takes minutes to hours. Try num_rounds=1 "
        "num_warmup_rounds=0 with few prompts and new tokens, or model.device=cuda."
    ]


def find_handicap(kind: DriverKind, attention: AttentionChoice, device: torch.device) -> list[str]:
    """A driver on a GPU that is far from its best, which a comparison should know."""
    if not kind.is_best_with_flash or device.type != "cuda" or not attention.is_masked:
        return []
    return [
        f"driver={kind.name} with {attention.implementation} attention runs without CUDA graphs, several times slower "
        "than at its best: it needs bfloat16 or float16 and the package flash-attn-3 (Hopper) or flash-attn."
    ]
