"""How many cache blocks a round needs, and how much of the cache to keep free while it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cbexp.engine.requests import PromptGroup
from cbexp.engine.types import CBSyncConfig

# Of one row over two blocks, and one to spare.
MIN_BLOCKS_FOR_CHECK = 3

# Free share below which no further prompt is admitted, so that running requests can grow. Upstream's figure for FIFO:
# with uneven lengths and 0.6 of the blocks needed it halves the tokens read again, at 1 % more steps than 0.
CROWDED_SAFETY_MARGIN = 0.15

# Requests that decode at once when nobody says how many: a decode step of a larger batch hardly makes more tokens a
# second, since attention reads as many keys for each of them, and every request more takes its share of the cache.
DEFAULT_MAX_REQUESTS = 256


def count_blocks_needed(groups: Iterable[PromptGroup], page_size: int, rounding_blocks: int) -> int:
    """Blocks that hold every request of a round at full length at once, none of them shared.

    Each request takes whole pages; `rounding_blocks` covers rounding to sectors in models with several attention types.
    """
    blocks = sum(len(g.numbers) * math.ceil(g.num_stored_tokens / page_size) for g in groups)
    return blocks + rounding_blocks


def choose_safety_margin(blocks_needed: int, num_blocks: int) -> float:
    """0 when the round fits, so that a cache of exactly its size admits all of it; else `CROWDED_SAFETY_MARGIN`."""
    return 0.0 if blocks_needed <= num_blocks else CROWDED_SAFETY_MARGIN


def resolve_max_requests(config: CBSyncConfig, num_blocks: int) -> int:
    """Most requests of one batch: each of them has a block of its own and, in an ordinary step, a token."""
    largest = DEFAULT_MAX_REQUESTS if config.buckets is None else config.buckets[-1]
    return min(config.max_requests_per_batch or largest, num_blocks, config.max_batch_tokens)


def add_spare_blocks(num_blocks: int, config: CBSyncConfig) -> int:
    """`num_blocks`, or the few more that a self-check takes when a round needs hardly any."""
    has_check = config.has_engine_attention and config.self_check
    return max(num_blocks, MIN_BLOCKS_FOR_CHECK) if has_check else num_blocks
