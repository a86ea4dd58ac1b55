"""How large the paged cache and the batches of a round are, once its prompts are known."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from cbexp.config import name_settings
from cbexp.engine.requests import GroupLengths
from cbexp.engine.sizing import (
    CacheSize,
    describe_shortage,
    format_gib,
    measure_need,
    size_cache,
)
from cbexp.engine.support import read_positions
from cbexp.engine.types import CacheMemoryError, CBSyncConfig
from cbexp.errors import ConfigError, MemoryBudgetError
from cbexp.planning.plan import RunPlan

logger = logging.getLogger(__name__)


def full_lengths(plan: RunPlan, prompt_lengths: Sequence[int]) -> list[int]:
    """Return the tokens of each prompt's requests at full length: the prompt's and all new ones."""
    return [length + limit for length, limit in zip(prompt_lengths, plan.limits, strict=True)]


def check_prompt_lengths(plan: RunPlan, prompt_lengths: Sequence[int]) -> None:
    """Raise `ConfigError`, naming the prompt, when prompt and new tokens exceed the model's positions."""
    positions = read_positions(plan.architecture)
    index, longest = _find_longest(plan, prompt_lengths)
    if positions.count is None or longest <= positions.count:
        return
    raise ConfigError(
        f"prompt {index} has {prompt_lengths[index]} tokens, which with {plan.limits[index]} new tokens "
        f"exceed {positions}. Lower sampling.max_new_tokens or shorten the prompts."
    )


def group_lengths(plan: RunPlan, prompt_lengths: Sequence[int]) -> list[GroupLengths]:
    """Return what each prompt's requests take of a cache."""
    num_generations = plan.config.dataset.num_generations
    return [
        GroupLengths(length, limit, num_generations)
        for length, limit in zip(prompt_lengths, plan.limits, strict=True)
    ]


def round_settings(plan: RunPlan, prompt_lengths: Sequence[int]) -> CBSyncConfig:
    """Return the engine's settings with the size that the cache was asked for, and no more requests than there are."""
    num_requests = len(prompt_lengths) * plan.config.dataset.num_generations
    num_blocks = None if plan.cache_tokens is None else math.ceil(plan.cache_tokens / plan.page_size)
    return replace(
        plan.settings,
        num_blocks=num_blocks,
        max_requests_per_batch=min(plan.max_requests_per_batch, num_requests),
    )


def size_for_round(plan: RunPlan, prompt_lengths: Sequence[int], free_bytes: int) -> CacheSize:
    """Return the cache for a round: the size that was asked for, else what the round needs and `free_bytes` allows.

    Raises:
        ConfigError: the longest request can never fit the cache that was asked for.
        MemoryBudgetError: it does not fit the memory either.
    """
    settings = round_settings(plan, prompt_lengths)
    need = measure_need(group_lengths(plan, prompt_lengths), plan.architecture, settings)
    if settings.num_blocks is not None and need.longest_blocks > settings.num_blocks:
        index, num_tokens = _find_longest(plan, prompt_lengths)
        raise ConfigError(
            f"cache.num_tokens={plan.cache_tokens} holds {settings.num_blocks} pages of {plan.page_size} tokens, and "
            f"prompt {index} needs {need.longest_blocks} of them for its {num_tokens - 1} tokens "
            f"({prompt_lengths[index]} prompt + {plan.limits[index]} new). "
            f"Raise cache.num_tokens to at least {need.longest_blocks * plan.page_size}."
        )
    try:
        size = size_cache(need, plan.architecture, plan.dtype, settings, free_bytes)
    except CacheMemoryError as error:
        raise MemoryBudgetError(name_settings(str(error))) from error
    shortage = describe_shortage(need, size, settings)
    if shortage is not None:
        logger.warning(name_settings(shortage))
        plan.warnings.append(name_settings(shortage))  # so that the summary tells of it too
    return size


def max_requests_in_memory(plan: RunPlan, prompt_lengths: Sequence[int], free_bytes: int) -> int:
    """Return how many left-padded rows `generate` can hold at full length, at most `plan.max_requests_per_batch`.

    Raises:
        MemoryBudgetError: not even one fits.
    """
    # A batch generates until its last request ends, so that any row may have to hold both maxima.
    row_tokens = max(prompt_lengths) + plan.max_new_tokens
    row_bytes = row_tokens * plan.kv_bytes_per_token
    num_rows = int(free_bytes * plan.config.cache.max_memory_fraction // row_bytes)
    if num_rows == 0:
        raise MemoryBudgetError(
            f"{plan.device} has {format_gib(free_bytes)} free, and one request of {row_tokens} tokens takes "
            f"{format_gib(row_bytes)} of keys and values. Lower sampling.max_new_tokens or shorten the prompts."
        )
    return min(num_rows, plan.max_requests_per_batch)


def _find_longest(plan: RunPlan, prompt_lengths: Sequence[int]) -> tuple[int, int]:
    """The prompt whose requests are longest at full length, and that length."""
    lengths = full_lengths(plan, prompt_lengths)
    longest = max(lengths)
    return lengths.index(longest), longest
