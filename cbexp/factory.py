"""Builds what a job runs with: the plan, the ids that end a completion, and the driver with its cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import transformers
from transformers import GenerationConfig, PreTrainedTokenizerBase

from cbexp.config import ExperimentConfig
from cbexp.dataset.prompts import PromptSet
from cbexp.engine import CBSyncConfig, OnStep, RolloutDriver, SyncCBDriver, check_transformers_version
from cbexp.errors import ConfigError
from cbexp.model.loading import LoadedModel
from cbexp.model.memory import free_memory_bytes
from cbexp.peers.base import PeerConfig
from cbexp.peers.generate import GenerateDriver
from cbexp.peers.manager import ManagerDriver
from cbexp.peers.vllm_driver import VllmDriver
from cbexp.planning.cache_sizing import (
    CacheSize,
    check_prompt_lengths,
    full_lengths,
    max_requests_in_memory,
    size_cache,
)
from cbexp.planning.compile_cache import compile_environment, describe_compile_cache, explaining_full_cache
from cbexp.planning.compile_choice import ENGINE_MODES
from cbexp.planning.dry_run import DryRunReport, summarize_dry_run
from cbexp.planning.plan import RunPlan, build_plan
from cbexp.planning.roofline import measure_roofline
from cbexp.planning.vllm_settings import build_vllm_config

__all__ = [
    "DryRunReport",
    "RunPlan",
    "build_driver",
    "build_plan",
    "build_vllm_driver",
    "compile_environment",
    "describe_compile_cache",
    "explaining_full_cache",
    "measure_roofline",
    "resolve_stop_ids",
    "summarize_dry_run",
]


def resolve_stop_ids(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase | None, loaded: LoadedModel
) -> tuple[tuple[int, ...], int]:
    """Return the ids that end a completion, in ascending order, and the id that pads, the same for every driver.

    Stop ids are those that the configuration sets, else the tokenizer's and the model's together; none when EOS is
    ignored. Padding is the configuration's, else the tokenizer's, else the first stop id, else 0: it is never read.

    Raises:
        ConfigError: an id is not one of the model's.
    """
    if config.sampling.eos_token_ids is not None:
        stop_ids = set(config.sampling.eos_token_ids)
    else:
        stop_ids = set(loaded.generation_eos_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            stop_ids.add(int(tokenizer.eos_token_id))
    candidates = [config.sampling.pad_token_id, tokenizer.pad_token_id if tokenizer is not None else None]
    pad_id = next((int(i) for i in candidates if i is not None), min(stop_ids, default=0))
    for name, token_id in [*(("eos_token_ids", i) for i in sorted(stop_ids)), ("pad_token_id", pad_id)]:
        if not 0 <= token_id < loaded.vocab_size:
            raise ConfigError(
                f"token id {token_id} is not one of the model's, 0 to {loaded.vocab_size - 1}: set sampling.{name}."
            )
    return (() if config.sampling.ignore_eos else tuple(sorted(stop_ids))), pad_id


def build_driver(
    config: ExperimentConfig,
    plan: RunPlan,
    loaded: LoadedModel,
    prompts: PromptSet,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    on_step: OnStep | None = None,
) -> RolloutDriver:
    """Return the driver of `plan` (any but vllm) on the loaded model, its cache and batches sized for `prompts`.

    `on_step` is called by the synchronous driver; the others cannot see their steps while they run.

    Raises:
        ConfigError: a prompt is too long for the model or for the cache that was asked for.
        MemoryBudgetError: what a round needs at least does not fit the free memory.
        EngineError: the driver does not take this model or these settings.
    """
    lengths = [len(ids) for ids in prompts.prompt_ids]
    check_prompt_lengths(plan, lengths)
    free_bytes = free_memory_bytes(plan.device)
    if plan.driver == "generate":
        num_rows = max_requests_in_memory(plan, lengths, free_bytes)
        size = CacheSize(
            num_blocks=0, max_batch_tokens=plan.max_batch_tokens, max_requests_per_batch=num_rows
        )
        return GenerateDriver(loaded.model, _peer_config(plan, size, lengths, eos_token_ids, pad_token_id))
    size = size_cache(plan, lengths, config.dataset.num_generations, _slack_blocks(plan), free_bytes)
    if plan.driver == "manager":
        return ManagerDriver(loaded.model, _peer_config(plan, size, lengths, eos_token_ids, pad_token_id))
    # An empty generation config: nothing of the model's own may leak in.
    settings = _sync_config(config, plan, size, eos_token_ids, pad_token_id, on_step)
    if plan.decode is not None:
        settings = dataclasses.replace(settings, **vars(plan.decode))
    return SyncCBDriver(loaded.model, GenerationConfig(), settings)


def build_vllm_driver(
    config: ExperimentConfig,
    plan: RunPlan,
    prompts: PromptSet,
    eos_token_ids: tuple[int, ...],
    log_path: Path,
    on_progress: Callable[[str], None],
) -> RolloutDriver:
    """Return the driver of `plan` whose vLLM logs to `log_path` and is started by its `warmup`.

    Raises:
        ConfigError: a prompt is too long for the model or the cache, or vLLM's interpreter or path is not there.
        ModelError: the model's files are not there and cannot be fetched.
    """
    lengths = [len(ids) for ids in prompts.prompt_ids]
    check_prompt_lengths(plan, lengths)
    return VllmDriver(build_vllm_config(config, plan, lengths, eos_token_ids, log_path), on_progress)


def _sync_config(
    config: ExperimentConfig,
    plan: RunPlan,
    size: CacheSize,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    on_step: OnStep | None,
) -> CBSyncConfig:
    compile_mode, cuda_graph = ENGINE_MODES[plan.compile_mode]
    return CBSyncConfig(
        max_new_tokens=plan.max_new_tokens,
        eos_token_id=eos_token_ids,
        pad_token_id=pad_token_id,
        attn_implementation=plan.attention.implementation,
        compile_mode=compile_mode,
        cuda_graph=cuda_graph,
        recompile_limit=None if compile_mode is None else config.compile.recompile_limit,
        page_size=plan.page_size,
        num_blocks=size.num_blocks,
        max_batch_tokens=size.max_batch_tokens,
        max_requests_per_batch=size.max_requests_per_batch,
        allow_block_sharing=plan.block_sharing,
        scheduler=plan.scheduler,
        on_step=on_step,
    )


def _peer_config(
    plan: RunPlan,
    size: CacheSize,
    prompt_lengths: list[int],
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
) -> PeerConfig:
    return PeerConfig(
        max_new_tokens=plan.max_new_tokens,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        compile_mode=plan.compile_mode,
        max_requests_per_batch=size.max_requests_per_batch,
        page_size=plan.page_size,
        num_blocks=size.num_blocks,
        max_batch_tokens=size.max_batch_tokens,
        allow_block_sharing=plan.block_sharing,
        scheduler=plan.scheduler,
        max_request_tokens=max(full_lengths(plan, prompt_lengths)),
    )


def _slack_blocks(plan: RunPlan) -> int:
    """Blocks that the paged cache wastes by rounding; its internals are imported only in a version that is known."""
    check_transformers_version(transformers.__version__)
    from cbexp.engine.cb_internals import sector_slack_blocks

    return sector_slack_blocks(plan.architecture)
