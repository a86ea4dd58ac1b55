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
_COMPILER_SETTINGS = {"recompile_limit", "cache_dir"}
_MODES_WITHOUT_COMPILER = ("eager", "cuda_graph")


def idle_settings(config: ExperimentConfig) -> list[str]:
    """Return one line for each setting that differs from its default and changes nothing in this combination.

    These are warnings and not errors because a sweep over another setting makes them idle in some of its jobs.
    """
    return [
        *_find_in_model(config),
        *_find_in_adapter(config),
        *_find_in_sampling(config),
        *_find_in_cache(config),
        *_find_in_compile(config),
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
    if config.sampling.ignore_eos:
        yield from _describe("sampling", config.sampling, {"eos_token_ids"}, "sampling.ignore_eos=true")


def _find_in_cache(config: ExperimentConfig) -> Iterator[str]:
    cache = config.cache
    if not config.has_paged_cache:
        reason = f"driver={config.driver.name}, which has no paged cache"
        yield from _describe("cache", cache, _SETTINGS_OF_THE_PAGED_CACHE, reason)
        if cache.block_sharing == "on":
            yield from _describe("cache", cache, {"block_sharing"}, reason)
    elif cache.num_tokens is not None:
        yield from _describe("cache", cache, {"max_memory_fraction"}, f"cache.num_tokens={cache.num_tokens}")


def _find_in_compile(config: ExperimentConfig) -> Iterator[str]:
    if config.compile.mode in _MODES_WITHOUT_COMPILER:
        reason = f"compile.mode={config.compile.mode}, which compiles nothing"
        yield from _describe("compile", config.compile, _COMPILER_SETTINGS, reason)


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
