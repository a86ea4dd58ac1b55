"""Builds what a job runs with: the ids that end a completion, and the driver with its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cbexp.config import ExperimentConfig
from cbexp.dataset.prompts import PromptSet
from cbexp.drivers.inputs import DriverInputs
from cbexp.engine import OnStep, RolloutDriver
from cbexp.engine.sizing import free_memory_bytes
from cbexp.errors import ConfigError
from cbexp.model.loading import LoadedModel
from cbexp.planning.cache_sizing import check_prompt_lengths, max_requests_in_memory, size_for_round
from cbexp.planning.plan import RunPlan


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
    plan: RunPlan,
    loaded: LoadedModel,
    prompts: PromptSet,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_step: OnStep | None = None,
    log_path: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RolloutDriver:
    """Return the driver of `plan` on the loaded model, its cache and batches sized for `prompts`.

    `tokenizer` is for stop strings. `on_step` is called by the synchronous driver; the others cannot see their steps
    while they run. A driver with a process of its own logs to `log_path`; its `warmup` starts it and reports to
    `on_progress`.

    Raises:
        ConfigError: a prompt is too long for the model or for the cache that was asked for.
        MemoryBudgetError: what a round needs at least does not fit the free memory.
        ModelError: the model's files are not there and cannot be fetched.
        EngineError: the driver does not take this model or these settings.
    """
    lengths = [len(ids) for ids in prompts.prompt_ids]
    check_prompt_lengths(plan, lengths)
    settings = replace(
        plan.settings,
        eos_token_id=eos_token_ids,
        pad_token_id=pad_token_id,
        on_step=on_step,
        **({} if plan.kind.own_process else _size_for_round(plan, lengths)),
    )
    return plan.kind.build(
        DriverInputs(
            plan=plan,
            settings=settings,
            model=loaded.model,
            tokenizer=tokenizer,
            prompt_lengths=lengths,
            log_path=log_path,
            on_progress=on_progress,
        )
    )


def _size_for_round(plan: RunPlan, prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """The engine's settings that say how much memory a driver may take here."""
    free_bytes = free_memory_bytes(plan.device)
    if not plan.kind.has_paged_cache:
        return {"max_requests_per_batch": max_requests_in_memory(plan, prompt_lengths, free_bytes)}
    size = size_for_round(plan, prompt_lengths, free_bytes)
    names = ("num_blocks", "max_batch_tokens", "max_requests_per_batch")
    return {name: getattr(size, name) for name in names}
