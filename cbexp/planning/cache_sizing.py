"""How large the paged cache and the batches of a round are, once its prompts are known."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbexp.engine.sizing import add_spare_blocks
from cbexp.engine.support import read_positions
from cbexp.errors import ConfigError, MemoryBudgetError
from cbexp.model.memory import (
    CacheCost,
    cache_tokens_needed,
    estimate_cache_cost,
    format_gib,
    request_blocks_needed,
)
from cbexp.planning.plan import RunPlan, what_to_lower

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSize:
    """A cache of `num_blocks` blocks, one page of every layer each, and the tokens and requests of the largest step."""

    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int


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


def size_cache(
    plan: RunPlan, prompt_lengths: Sequence[int], num_generations: int, rounding_blocks: int, free_bytes: int
) -> CacheSize:
    """Return the cache for a round: the size that was asked for, else what the round needs and `free_bytes` allows.

    `rounding_blocks` is what rounding can waste in a model with several kinds of layers.

    Raises:
        ConfigError: the longest request can never fit the cache that was asked for.
        MemoryBudgetError: it does not fit the memory either.
    """
    num_requests = len(prompt_lengths) * num_generations
    max_requests = min(plan.max_requests_per_batch, max(num_requests, num_generations))
    max_batch_tokens = min(plan.config.cache.max_batch_tokens, sum(prompt_lengths) * num_generations)
    if plan.cache_tokens is not None:
        num_blocks = math.ceil(plan.cache_tokens / plan.page_size)
        _check_longest_fits(plan, num_blocks, prompt_lengths)
    else:
        cost = estimate_cache_cost(
            plan.architecture, plan.dtype, max_batch_tokens, max_requests, is_masked=plan.attention.is_masked
        )
        needed = _size_for_round(plan, prompt_lengths, num_generations, rounding_blocks, cost, free_bytes)
        num_blocks = add_spare_blocks(needed, plan.settings)
    return CacheSize(num_blocks, max_batch_tokens, max_requests)


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


def _longest_request(plan: RunPlan, prompt_lengths: Sequence[int]) -> tuple[int, int]:
    """Tokens that the longest request stores (its last token is returned and never stored), and their blocks."""
    num_tokens = _find_longest(plan, prompt_lengths)[1] - 1
    return num_tokens, request_blocks_needed(plan.layout, num_tokens, plan.page_size)


def _check_longest_fits(plan: RunPlan, num_blocks: int, prompt_lengths: Sequence[int]) -> None:
    num_tokens, blocks_needed = _longest_request(plan, prompt_lengths)
    if blocks_needed > num_blocks:
        index, _ = _find_longest(plan, prompt_lengths)
        raise ConfigError(
            f"cache.num_tokens={plan.cache_tokens} holds {num_blocks} pages of {plan.page_size} tokens, and prompt "
            f"{index} needs {blocks_needed} of them for its {num_tokens} tokens "
            f"({prompt_lengths[index]} prompt + {plan.limits[index]} new). "
            f"Raise cache.num_tokens to at least {blocks_needed * plan.page_size}."
        )


def _size_for_round(
    plan: RunPlan,
    prompt_lengths: Sequence[int],
    num_generations: int,
    rounding_blocks: int,
    cost: CacheCost,
    free_bytes: int,
) -> int:
    tokens_needed = cache_tokens_needed(full_lengths(plan, prompt_lengths), num_generations, plan.page_size)
    blocks_needed = tokens_needed // plan.page_size + rounding_blocks
    blocks_that_fit = cost.tokens_within(free_bytes * plan.config.cache.max_memory_fraction) // plan.page_size
    if blocks_needed <= blocks_that_fit:
        return blocks_needed
    num_tokens, longest_blocks = _longest_request(plan, prompt_lengths)
    if blocks_that_fit < longest_blocks + rounding_blocks:
        least_bytes = cost.total_bytes((longest_blocks + rounding_blocks) * plan.page_size)
        raise MemoryBudgetError(
            f"{plan.device} has {format_gib(free_bytes)} free, of which cache.max_memory_fraction="
            f"{plan.config.cache.max_memory_fraction} may be used, and the longest request ({num_tokens} tokens) takes "
            f"{format_gib(least_bytes)} with a step's buffers. Lower {what_to_lower(plan)}."
        )
    warning = (
        f"cache=auto: the round needs {blocks_needed * plan.page_size} tokens and {blocks_that_fit * plan.page_size} "
        f"fit in {plan.config.cache.max_memory_fraction:g} of the free memory ({format_gib(free_bytes)}): "
        "requests wait for each other."
    )
    logger.warning(warning)
    plan.warnings.append(warning)  # so that the summary tells of it too
    return blocks_that_fit
