"""How many cache blocks a round needs, and how much of the cache to keep free while it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cbexp.engine.request_book import PromptGroup

# Free share below which no further prompt is admitted, so that running requests can grow. Upstream's figure for FIFO:
# with uneven lengths and 0.6 of the blocks needed it halves the tokens read again, at 1 % more steps than 0.
CROWDED_SAFETY_MARGIN = 0.15


def count_blocks_needed(groups: Iterable[PromptGroup], page_size: int, slack_blocks: int) -> int:
    """Blocks that hold every request of a round at full length at once, none of them shared.

    Each request takes whole pages; `slack_blocks` covers rounding to sectors in models with several attention types.
    """
    blocks = sum(len(g.request_ids) * math.ceil(g.num_stored_tokens / page_size) for g in groups)
    return blocks + slack_blocks


def choose_safety_margin(blocks_needed: int, num_blocks: int) -> float:
    """0 when the round fits, so that a cache of exactly its size admits all of it; else `CROWDED_SAFETY_MARGIN`."""
    return 0.0 if blocks_needed <= num_blocks else CROWDED_SAFETY_MARGIN
