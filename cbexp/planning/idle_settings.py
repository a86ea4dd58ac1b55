"""Finds settings that have no effect in their combination; what can never be meant is refused by the schema itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cbexp.config import ExperimentConfig, list_changed_fields

_SETTINGS_OF_THE_PAGED_CACHE = {
    "num_tokens",
    "page_size",
    "max_batch_tokens",
    "scheduler",
    "max_memory_fraction",
}
# Of these vLLM decides itself.
_CACHE_SETTINGS_WITHOUT_VLLM = {"max_batch_tokens", "scheduler"}
_MODES_WITHOUT_COMPILER = ("eager", "cuda_graph")
_BATCH_SETTINGS = {"batch_shape", "buckets", "max_burst", "self_check"}
_ENGINE_SETTINGS = {"region", "fusion"} | _BATCH_SETTINGS
_ENGINE_ATTENTIONS = ("auto", "cbexp")


def idle_settings(config: ExperimentConfig, has_kernels: bool = False) -> list[str]:
    """Return one line for each setting that differs from its default and changes nothing in this combination.

    `has_kernels`: the driver compiles kernels of its own, whatever the compile mode. These are warnings and not errors
    because a sweep over another setting makes them idle in some of its jobs.
    """
    return [
        *_find_in_model(config),
        *_find_in_adapter(config),
        *_find_in_sampling(config),
        *_find_in_cache(config),
        *_find_in_compiler(config, has_kernels),
        *_find_in_decode(config),
        *_find_in_driver(config),
        *_find_in_tracking(config),
        *_find_in_root(config),
    ]


def _find_in_model(config: ExperimentConfig) -> Iterator[str]:
    model = config.model
    if model.init == "random" and config.dataset.kind == "synthetic":
        yield from _describe(
            "model", model, {"revision", "trust_remote_code"}, "model.init=random with synthetic prompts"
        )
    elif model.is_builtin:
        yield from _describe("model", model, {"architecture", "trust_remote_code"}, f"model={model.name}")


def _find_in_adapter(config: ExperimentConfig) -> Iterator[str]:
    adapter = config.adapter
    if adapter.kind == "none":
        yield from _describe("adapter", adapter, set(list_changed_fields(adapter)), "adapter=none")
    elif adapter.path is not None:
        described = {"rank", "alpha", "target_modules"}
        yield from _describe("adapter", adapter, described, "adapter.path, whose own files say it")
    else:
        yield from _describe("adapter", adapter, {"revision"}, "a random adapter (adapter.path is not set)")


def _find_in_sampling(config: ExperimentConfig) -> Iterator[str]:
    sampling = config.sampling
    if config.driver.name != "generate":
        reason = f"driver={config.driver.name}, which pads no prompt"
        yield from _describe("sampling", sampling, {"pad_token_id"}, reason)
    if sampling.ignore_eos:
        yield from _describe("sampling", sampling, {"eos_token_ids"}, "sampling.ignore_eos=true")
    if sampling.median_new_tokens is None:
        drawn = {"sigma_new_tokens", "new_tokens_seed"}
        yield from _describe(
            "sampling", sampling, drawn, "sampling.median_new_tokens=null: no limit is drawn"
        )


def _find_in_cache(config: ExperimentConfig) -> Iterator[str]:
    cache = config.cache
    if not config.has_paged_cache:
        reason = f"driver={config.driver.name}, which has no paged cache"
        yield from _describe("cache", cache, _SETTINGS_OF_THE_PAGED_CACHE, reason)
        if cache.block_sharing == "on":
            yield from _describe("cache", cache, {"block_sharing"}, reason)
    elif config.driver.name == "vllm":
        yield from _describe(
            "cache", cache, _CACHE_SETTINGS_WITHOUT_VLLM, "driver=vllm, which decides itself"
        )
    if config.has_paged_cache and cache.num_tokens is not None:
        yield from _describe("cache", cache, {"max_memory_fraction"}, f"cache.num_tokens={cache.num_tokens}")


def _find_in_compiler(config: ExperimentConfig, has_kernels: bool) -> Iterator[str]:
    settings = config.compile
    if config.driver.name == "vllm":
        yield from _describe("compile", settings, {"recompile_limit"}, "driver=vllm, which compiles itself")
    elif settings.mode in _MODES_WITHOUT_COMPILER:
        idle = {"recompile_limit"} if has_kernels else {"recompile_limit", "cache_dir"}
        reason = f"compile.mode={settings.mode}, which compiles nothing"
        yield from _describe("compile", settings, idle, reason)


def _find_in_decode(config: ExperimentConfig) -> Iterator[str]:
    settings, driver, attention = config.compile, config.driver.name, config.model.attn_implementation
    if driver != "sync":
        reason = f"driver={driver}: it is a setting of driver=sync"
        yield from _describe("compile", settings, _ENGINE_SETTINGS, reason)
        if driver == "manager":
            reason = "driver=manager, which compiles on a thread of its own, where PyTorch's own limit holds"
            yield from _describe("compile", settings, {"recompile_limit"}, reason)
    elif attention not in _ENGINE_ATTENTIONS:
        reason = (
            f"model.attn_implementation={attention}, with which transformers' own forward makes each step"
        )
        yield from _describe("compile", settings, _BATCH_SETTINGS, reason)
    elif settings.batch_shape == "natural":
        yield from _describe("compile", settings, {"buckets"}, "compile.batch_shape=natural")


def _find_in_driver(config: ExperimentConfig) -> Iterator[str]:
    driver = config.driver
    if driver.name != "vllm":
        changed = set(list_changed_fields(driver)) - {"name"}
        yield from _describe(
            "driver", driver, changed, f"driver={driver.name}: it is a setting of driver=vllm"
        )


def _find_in_tracking(config: ExperimentConfig) -> Iterator[str]:
    tracking = config.tracking
    if tracking.mode == "disabled":
        changed = set(list_changed_fields(tracking)) - {"mode"}
        yield from _describe("tracking", tracking, changed, "tracking.mode=disabled")
    elif not tracking.log_completions:
        yield from _describe(
            "tracking", tracking, {"max_logged_completions"}, "tracking.log_completions=false"
        )


def _find_in_root(config: ExperimentConfig) -> Iterator[str]:
    if config.dry_run and config.stats_path is not None:
        yield f"stats_path={config.stats_path} has no effect with dry_run=true: nothing is measured."


def _describe(group: str, settings: Any, candidates: Iterable[str], reason: str) -> Iterator[str]:
    wanted = set(candidates)
    for key in list_changed_fields(settings):
        if key in wanted:
            yield f"{group}.{key}={getattr(settings, key)} has no effect with {reason}."
