"""Resolves everything that a configuration leaves to the machine, once, before any weight is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from cbexp.config import ExperimentConfig
from cbexp.dataset.completion_limits import load_completion_limits
from cbexp.errors import ConfigError
from cbexp.model.attention_choice import AttentionChoice, resolve_attention
from cbexp.model.device import resolve_device, resolve_dtype
from cbexp.model.loading import load_architecture
from cbexp.model.memory import (
    CacheLayout,
    WeightSize,
    check_fits,
    describe_cache_layout,
    free_memory_bytes,
    kv_bytes_per_token,
    measure_weights,
    total_memory_bytes,
)
from cbexp.planning.compile_cache import uses_compile_cache
from cbexp.planning.compile_choice import DecodePlan, choose_compile_mode, plan_decode
from cbexp.planning.plan_warnings import (
    find_handicap,
    find_idle_buckets,
    find_idle_self_check,
    find_idle_settings,
    find_rounded_cache,
    find_slowness,
)

PAGE_SIZE = 256
PAGE_SIZE_WITH_SHARING = 32
PAGE_SIZE_OF_VLLM = 16
PAGED_CACHE_KEYS = ("cache_tokens", "page_size", "block_sharing", "scheduler", "max_batch_tokens")
# A round of so many runs at once with every paged driver alike, so that they compare; upstream's own bound.
MAX_REQUESTS_PER_BATCH = 1024


@dataclass(frozen=True)
class RunPlan:
    """What a job will run with. `cache_tokens` None: sized for the round once its prompts are known.

    `limits` has the new tokens that each prompt's requests may have. `decode` is None where each step is transformers'.
    `max_batch_tokens` is the most a step processes; a round with fewer prompt tokens takes less.
    """

    driver: str
    device: torch.device
    dtype: torch.dtype
    attention: AttentionChoice
    compile_mode: str
    decode: DecodePlan | None
    architecture: PreTrainedConfig
    weights: WeightSize
    limits: tuple[int, ...]
    has_paged_cache: bool
    cache_tokens: int | None
    page_size: int
    block_sharing: bool
    scheduler: Literal["fifo", "prefill_first"]
    max_batch_tokens: int
    max_requests_per_batch: int
    max_memory_fraction: float
    warnings: list[str]

    @property
    def max_new_tokens(self) -> int:
        """The largest limit of a request."""
        return max(self.limits)

    @property
    def uses_compile_cache(self) -> bool:
        """Whether compiled code is kept between runs."""
        return uses_compile_cache(self.compile_mode, self.driver, self.device)

    @property
    def layout(self) -> CacheLayout:
        """What the model caches."""
        return describe_cache_layout(self.architecture)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values over all layers."""
        return kv_bytes_per_token(self.architecture, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; what a driver has no use for is left out."""
        plan: dict[str, Any] = {
            "driver": self.driver,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn_implementation": self.attention.implementation,
            "attn_reason": self.attention.reason,
            "compile_mode": self.compile_mode,
            "model_type": self.architecture.model_type,
            "num_parameters": self.weights.num_parameters,
            "weight_bytes": self.weights.num_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "num_full_layers": self.layout.num_full_layers,
            "num_sliding_layers": self.layout.num_sliding_layers,
            "sliding_window": self.layout.sliding_window,
            "max_new_tokens": self.max_new_tokens,
            "mean_max_new_tokens": fmean(self.limits),
            "max_requests_per_batch": self.max_requests_per_batch,
        }
        if self.decode is not None:
            plan |= self.decode.to_dict()
        if self.has_paged_cache and self.driver != "vllm":
            plan |= {key: getattr(self, key) for key in PAGED_CACHE_KEYS}
        elif self.driver == "vllm":  # of its pages and steps it decides itself
            plan |= {key: getattr(self, key) for key in ("cache_tokens", "block_sharing")}
        return plan | {"warnings": list(self.warnings)}


def build_plan(config: ExperimentConfig) -> RunPlan:
    """Resolve `config` for this machine, and check that weights and an explicit cache fit it; loads no weight.

    Raises:
        ConfigError: the combination is impossible.
        NotApplicableError: it needs a GPU, and the model runs on a CPU.
        ModelError: the architecture cannot be read or is not supported, or the device or dtype is not there.
        MemoryBudgetError: weights and cache do not fit.
    """
    plan = resolve_plan(config)
    check_fits(
        plan.weights.num_bytes,
        plan.kv_bytes_per_token * (plan.cache_tokens or plan.page_size),
        _memory_bytes(plan),
        plan.device,
        what_to_lower(plan),
    )
    return plan


def resolve_plan(config: ExperimentConfig) -> RunPlan:
    """As `build_plan`, without asking whether anything fits."""
    _refuse_tensor_parallel()
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    architecture = load_architecture(config.model)
    driver = config.driver.name
    attention = resolve_attention(config.model.attn_implementation, driver, architecture, device, dtype)
    compile_mode = choose_compile_mode(config.compile.mode, driver, attention, device)
    decode = plan_decode(config.compile, compile_mode, attention, device) if driver == "sync" else None
    max_requests = _resolve_max_requests(config, decode)
    limits = tuple(load_completion_limits(config))
    _check_positions(config.dataset.min_length or 1, max(limits), architecture)
    block_sharing = _resolve_block_sharing(config, describe_cache_layout(architecture))
    cache_tokens = config.cache.num_tokens if config.has_paged_cache else None
    page_size = config.cache.page_size or _default_page_size(driver, block_sharing)
    weights = measure_weights(architecture, dtype)
    return RunPlan(
        driver=driver,
        device=device,
        dtype=dtype,
        attention=attention,
        compile_mode=compile_mode,
        decode=decode,
        architecture=architecture,
        weights=weights,
        limits=limits,
        has_paged_cache=config.has_paged_cache,
        cache_tokens=cache_tokens,
        page_size=page_size,
        block_sharing=block_sharing,
        scheduler="prefill_first" if config.cache.scheduler == "prefill_first" else "fifo",
        max_batch_tokens=config.cache.max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_memory_fraction=config.cache.max_memory_fraction,
        warnings=[
            *find_idle_settings(config, compile_mode, device),
            *find_idle_buckets(decode, max_requests),
            *find_idle_self_check(decode, compile_mode, device, dtype),
            *find_rounded_cache(cache_tokens, page_size),
            *find_handicap(driver, attention, device),
            *find_slowness(device, weights, config.model.num_threads),
        ],
    )


def _memory_bytes(plan: RunPlan) -> int:
    """What is free; for vLLM all of the device, since asking a GPU for more takes memory of it in this process."""
    return total_memory_bytes(plan.device) if plan.driver == "vllm" else free_memory_bytes(plan.device)


def what_to_lower(plan: RunPlan) -> str:
    """Name the settings that would make the job smaller, the most effective one first."""
    settings = ["cache.num_tokens"] if plan.cache_tokens is not None else []
    if plan.dtype is torch.float32 and plan.device.type == "cuda":
        settings.append("model.dtype (bfloat16 halves it)")
    settings += ["sampling.max_new_tokens"] if plan.has_paged_cache else []
    settings += ["cache.max_batch_tokens"] if plan.has_paged_cache and plan.driver != "vllm" else []
    return ", ".join(settings) + (", or take a smaller model" if settings else "the size of the model")


def _refuse_tensor_parallel() -> None:
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise ConfigError(
            f"WORLD_SIZE={num_processes}: tensor parallelism and sharded models are not supported. Start one process, "
            "without torchrun or accelerate launch."
        )


def _check_positions(shortest_prompt: int, longest_limit: int, architecture: PreTrainedConfig) -> None:
    """Refuse what not even the shortest prompt leaves room for; the real lengths are checked once they are known."""
    positions = getattr(architecture, "max_position_embeddings", None)
    if positions is not None and shortest_prompt + longest_limit > positions:
        raise ConfigError(
            f"sampling.max_new_tokens={longest_limit} and a prompt of {shortest_prompt} tokens exceed the model's "
            f"{positions} positions (max_position_embeddings)."
        )


def _default_page_size(driver: str, block_sharing: bool) -> int:
    if driver == "vllm":
        return PAGE_SIZE_OF_VLLM
    return PAGE_SIZE_WITH_SHARING if block_sharing else PAGE_SIZE


def _resolve_block_sharing(config: ExperimentConfig, layout: CacheLayout) -> bool:
    asked = config.cache.block_sharing
    if not config.has_paged_cache or asked == "off":
        return False
    can_share = layout.num_sliding_layers == 0
    if asked == "on" and not can_share:
        raise ConfigError(
            f"cache.block_sharing=on: {layout.num_sliding_layers} of the model's {layout.num_layers} layers have a "
            "sliding window, whose cache cannot be shared. Use auto or off."
        )
    return can_share and (asked == "on" or config.dataset.num_generations > 1)


def _resolve_max_requests(config: ExperimentConfig, decode: DecodePlan | None) -> int:
    if config.cache.max_requests_per_batch is not None:
        return config.cache.max_requests_per_batch
    num_requests = config.dataset.num_prompts * config.dataset.num_generations
    if not config.has_paged_cache:
        return num_requests
    bound = max(MAX_REQUESTS_PER_BATCH, config.dataset.num_generations)
    if decode is not None and decode.buckets is not None:
        bound = decode.buckets[-1]
    return min(num_requests, bound, config.cache.max_batch_tokens)
