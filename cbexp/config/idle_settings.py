"""Which settings have no effect in their combination; what can never be meant is refused by the schema itself.

These are warnings and not errors because a sweep over another setting makes them idle in some of its jobs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbexp.config.defaults import default_of
from cbexp.drivers.registry import STEP_SETTINGS
from cbexp.engine.types import COMPILE_MODES, ENGINE_ATTENTION

if TYPE_CHECKING:
    from cbexp.config.experiment import ExperimentConfig


@dataclass(frozen=True)
class IdleSetting:
    """A setting, by its dotted name, that differs from its default and changes nothing; `reason`: with what."""

    setting: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value} has no effect with {self.reason}."


def find_idle_settings(
    config: ExperimentConfig, compile_mode: str | None = None, has_kernels: bool = False
) -> list[IdleSetting]:
    """Return each setting that differs from its default and changes nothing, in the order of the schema.

    `compile_mode`: what `auto` has become. `has_kernels`: the driver compiles kernels of its own, whatever the mode.
    """
    reasons = find_reasons(config, compile_mode or config.compile.mode, has_kernels)
    return [
        IdleSetting(name, value, reasons[name])
        for name, value, default in _list_settings(config)
        if name in reasons and value != default
    ]


def find_reasons(config: ExperimentConfig, compile_mode: str, has_kernels: bool = False) -> dict[str, str]:
    """Return the settings that change nothing, changed or not, each with the reason as half a sentence."""
    reasons: dict[str, str] = {}
    for name, reason in _find_all(config, compile_mode, has_kernels):
        reasons.setdefault(name, reason)
    return reasons


def _find_all(config: ExperimentConfig, compile_mode: str, has_kernels: bool) -> Iterator[tuple[str, str]]:
    yield from _find_in_model(config)
    yield from _find_in_adapter(config)
    yield from _find_in_sampling(config)
    yield from _find_in_compile(config, compile_mode, has_kernels)
    yield from _find_by_driver(config)
    if config.cache.num_tokens is not None and config.driver_kind.has_paged_cache:
        yield "cache.max_memory_fraction", f"cache.num_tokens={config.cache.num_tokens}"
    if config.tracking.mode == "disabled":
        yield from _all_of("tracking", config.tracking, "tracking.mode=disabled", but=("mode",))
    elif not config.tracking.log_completions:
        yield "tracking.max_logged_completions", "tracking.log_completions=false"
    if config.dry_run:
        yield "stats_path", "dry_run=true: nothing is measured"


def _find_in_model(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    model = config.model
    if model.init == "random" and config.dataset.kind == "synthetic":
        reason = "model.init=random with synthetic prompts"
        yield from _each("model", ("revision", "trust_remote_code"), reason)
    elif model.is_builtin:
        yield from _each("model", ("architecture", "trust_remote_code"), f"model={model.name}")


def _find_in_adapter(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.adapter.kind == "none":
        yield from _all_of("adapter", config.adapter, "adapter=none")
    elif config.adapter.path is not None:
        reason = "adapter.path, whose own files say it"
        yield from _each("adapter", ("rank", "alpha", "target_modules"), reason)
    else:
        yield "adapter.revision", "a random adapter (adapter.path is not set)"


def _find_in_sampling(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.sampling.temperature == 0:
        reason = "sampling.temperature=0, the most likely token"
        yield from _each("sampling", ("top_k", "top_p", "min_p"), reason)
    if config.sampling.is_fixed_length:
        yield "sampling.min_new_tokens", "sampling.ignore_eos=true, without a stop token or string"
    if config.sampling.ignore_eos:
        yield "sampling.eos_token_ids", "sampling.ignore_eos=true"
    if config.sampling.median_new_tokens is None:
        reason = "sampling.median_new_tokens=null: no limit is drawn"
        yield from _each("sampling", ("sigma_new_tokens", "new_tokens_seed"), reason)


def _find_in_compile(config: ExperimentConfig, mode: str, has_kernels: bool) -> Iterator[tuple[str, str]]:
    kind, attention = config.driver_kind, config.model.attn_implementation
    if mode in COMPILE_MODES and COMPILE_MODES[mode].torch_mode is None and not kind.own_process:
        idle = ("recompile_limit",) if has_kernels else ("recompile_limit", "cache_dir")
        yield from _each("compile", idle, f"compile.mode={mode}, which compiles nothing")
    if kind.own_attention != ENGINE_ATTENTION:
        return
    if attention not in ("auto", ENGINE_ATTENTION):
        reason = (
            f"model.attn_implementation={attention}, with which transformers' own forward makes each step"
        )
        # But of fusion, which is refused.
        yield from _each("compile", (name for name in STEP_SETTINGS if name != "fusion"), reason)
    elif config.compile.batch_shape == "natural":
        yield "compile.buckets", "compile.batch_shape=natural"


def _find_by_driver(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    for name, reason in config.driver_kind.find_unread().items():
        # "off" asks a driver without sharing for what it does.
        if name != "cache.block_sharing" or config.cache.block_sharing == "on":
            yield name, reason
    if config.driver_kind.own_process:
        yield (
            "rescore.completions",
            f"driver={config.driver.name}, which has the model in a process of its own",
        )


def _each(group: str, names: Iterable[str], reason: str) -> Iterator[tuple[str, str]]:
    for name in names:
        yield f"{group}.{name}", reason


def _all_of(group: str, settings: Any, reason: str, but: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    names = (item.name for item in dataclasses.fields(settings) if item.name not in but)
    yield from _each(group, names, reason)


def _list_settings(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, value and default of every setting."""
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            yield from _list_settings(value, f"{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, default_of(item)
