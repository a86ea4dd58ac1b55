"""Resolves everything that a configuration leaves to the machine, once, before any weight is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedConfig

from cbexp.config import ExperimentConfig, IdleSetting, SamplingConfig, find_idle_settings, name_settings
from cbexp.dataset.completion_limits import load_completion_limits
from cbexp.drivers.registry import STEP_SETTINGS, DriverKind
from cbexp.engine.requests import check_sampling
from cbexp.engine.sizing import (
    DEFAULT_MAX_REQUESTS,
    CacheLayout,
    describe_cache_layout,
    free_memory_bytes,
    kv_bytes_per_token,
)
from cbexp.engine.support import read_positions
from cbexp.engine.types import ENGINE_ATTENTION, CBSyncConfig
from cbexp.errors import ConfigError
from cbexp.model.attention_choice import AttentionChoice, resolve_attention
from cbexp.model.device import resolve_device, resolve_dtype
from cbexp.model.loading import load_architecture
from cbexp.model.memory import WeightSize, check_fits, measure_weights, total_memory_bytes
from cbexp.planning.compile_cache import uses_compile_cache
from cbexp.planning.compile_choice import choose_compile_mode
from cbexp.planning.plan_warnings import (
    find_handicap,
    find_idle_buckets,
    find_idle_self_check,
    find_overridden_cache_dir,
    find_rounded_cache,
    find_slowness,
)


@dataclass(frozen=True)
class RunPlan:
    """A configuration with what it leaves to the machine.

    `limits` has the new tokens that each prompt's requests may have, `idle` the settings without effect. `warnings`
    has a line for each of those, and others.
    """

    config: ExperimentConfig
    device: torch.device
    dtype: torch.dtype
    attention: AttentionChoice
    compile_mode: str
    architecture: PreTrainedConfig
    weights: WeightSize
    limits: tuple[int, ...]
    page_size: int
    block_sharing: bool
    max_requests_per_batch: int
    idle: list[IdleSetting] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def kind(self) -> DriverKind:
        """What the driver can do."""
        return self.config.driver_kind

    @property
    def cache_tokens(self) -> int | None:
        """The size that the cache was asked for; None: sized for the round once its prompts are known."""
        return self.config.cache.num_tokens if self.kind.has_paged_cache else None

    @property
    def settings(self) -> CBSyncConfig:
        """The engine's settings, but for what the prompts and the loaded model decide."""
        return self.config.engine_settings(
            self.compile_mode,
            self.attention.implementation,
            max_new_tokens=self.max_new_tokens,
            page_size=self.page_size,
            allow_block_sharing=self.block_sharing,
            max_requests_per_batch=self.max_requests_per_batch,
        )

    @property
    def has_engine_steps(self) -> bool:
        """Whether decode steps are the engine's own."""
        return self.attention.implementation == ENGINE_ATTENTION

    @property
    def max_new_tokens(self) -> int:
        """The largest limit of a request."""
        return max(self.limits)

    @property
    def uses_compile_cache(self) -> bool:
        """Whether compiled code is kept between runs."""
        return uses_compile_cache(self.compile_mode, self.kind, self.device)

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
        settings = self.settings
        plan: dict[str, Any] = {
            "driver": self.kind.name,
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
        if self.has_engine_steps:
            plan |= {key: getattr(settings, key) for key in STEP_SETTINGS}
        if self.kind.has_paged_cache:
            cache = {
                "cache_tokens": self.cache_tokens,
                "page_size": self.page_size,
                "block_sharing": self.block_sharing,
                "scheduler": settings.scheduler,
                "max_batch_tokens": settings.max_batch_tokens,
            }
            decided = ("cache_tokens", "block_sharing") if self.kind.own_process else tuple(cache)
            plan |= {key: cache[key] for key in decided}
        return plan | {
            "settings_without_effect": [asdict(setting) for setting in self.idle],
            "warnings": list(self.warnings),
        }


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
    attention = resolve_attention(
        config.model.attn_implementation, config.driver_kind, architecture, device, dtype
    )
    compile_mode = choose_compile_mode(config, attention, device)
    limits = tuple(load_completion_limits(config))
    _check_positions(config.dataset.min_length or 1, max(limits), architecture)
    _check_sampling(config.sampling, min(limits), int(architecture.vocab_size))
    block_sharing = _resolve_block_sharing(config, describe_cache_layout(architecture))
    plan = RunPlan(
        config=config,
        device=device,
        dtype=dtype,
        attention=attention,
        compile_mode=compile_mode,
        architecture=architecture,
        weights=measure_weights(architecture, dtype),
        limits=limits,
        page_size=config.cache.page_size or config.driver_kind.page_sizes[block_sharing],
        block_sharing=block_sharing,
        max_requests_per_batch=_resolve_max_requests(
            config, config.engine_settings(compile_mode, attention.implementation).buckets
        ),
    )
    idle = find_idle_settings(config, compile_mode, has_kernels=plan.uses_compile_cache)
    idle += find_idle_self_check(plan.settings, device, dtype)
    warnings = [
        *map(str, idle),
        *(find_overridden_cache_dir(config.compile) if plan.uses_compile_cache else ()),
        *find_idle_buckets(plan.settings),
        *find_rounded_cache(plan.cache_tokens, plan.page_size),
        *find_handicap(plan.kind, attention, device),
        *find_slowness(device, plan.weights, config.model.num_threads),
    ]
    return replace(plan, idle=idle, warnings=warnings)


def _memory_bytes(plan: RunPlan) -> int:
    """What is free; for a process of its own all of the device, since asking a GPU for more takes memory of it here."""
    return total_memory_bytes(plan.device) if plan.kind.own_process else free_memory_bytes(plan.device)


def what_to_lower(plan: RunPlan) -> str:
    """Name the settings that would make the job smaller, the most effective one first."""
    settings = ["cache.num_tokens"] if plan.cache_tokens is not None else []
    if plan.dtype is torch.float32 and plan.device.type == "cuda":
        settings.append("model.dtype (bfloat16 halves it)")
    settings += ["sampling.max_new_tokens"] if plan.kind.has_paged_cache else []
    settings += ["cache.max_batch_tokens"] if "cache.max_batch_tokens" in plan.kind.reads else []
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
    positions = read_positions(architecture)
    if positions.count is not None and shortest_prompt + longest_limit > positions.count:
        raise ConfigError(
            f"sampling.max_new_tokens={longest_limit} and a prompt of {shortest_prompt} tokens exceed {positions}."
        )


def _check_sampling(sampling: SamplingConfig, shortest_limit: int, vocab_size: int) -> None:
    """What the settings alone do not show."""
    try:
        check_sampling("sampling", sampling.choice, vocab_size, reads_text=True)
    except ValueError as error:
        raise ConfigError(name_settings(str(error))) from error
    if sampling.min_new_tokens > shortest_limit:
        raise ConfigError(
            f"sampling.min_new_tokens={sampling.min_new_tokens} is more than a request may have: {shortest_limit} new "
            "tokens."
        )


def _resolve_block_sharing(config: ExperimentConfig, layout: CacheLayout) -> bool:
    asked = config.cache.block_sharing
    if not config.driver_kind.has_paged_cache or asked == "off":
        return False
    can_share = layout.num_sliding_layers == 0
    if asked == "on" and not can_share:
        raise ConfigError(
            f"cache.block_sharing=on: {layout.num_sliding_layers} of the model's {layout.num_layers} layers have a "
            "sliding window, whose cache cannot be shared. Use auto or off."
        )
    return can_share and (asked == "on" or config.dataset.num_generations > 1)


def _resolve_max_requests(config: ExperimentConfig, buckets: Sequence[int] | None) -> int:
    if config.cache.max_requests_per_batch is not None:
        return config.cache.max_requests_per_batch
    num_requests = config.dataset.num_prompts * config.dataset.num_generations
    if not config.driver_kind.has_paged_cache:
        return num_requests
    bound = max(DEFAULT_MAX_REQUESTS, config.dataset.num_generations) if buckets is None else buckets[-1]
    return min(num_requests, bound, config.cache.max_batch_tokens)
