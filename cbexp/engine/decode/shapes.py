"""The shape of a burst: how many rows a decode step computes, and how many steps run before the host looks again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbexp.engine.types import BatchShape

# While requests wait for a row. A row that ends early idles for half a burst on average, and each admission costs the
# rows about as much time as five steps. At 256 rows of 600 tokens, a row ends every other step or so: 32 steps lose
# 2 % of the rows' time to idling, and the admission between bursts pays for 14 rows at once.
ADMISSION_BURST = 32

# With nothing waiting, while rows may end at any token: a batch that has emptied goes on in a smaller bucket then.
TAIL_BURST = 64

# On a CPU a look costs next to nothing, and rows that have ended are computed to the burst's end.
TAIL_BURST_ON_CPU = 8

# Shorter bursts cost more host time than a smaller batch gives back.
MIN_BURST = 8


@dataclass(frozen=True)
class BatchShapes:
    """Ascending `buckets` under a policy; `max_rows`, the largest of them, bounds every batch."""

    policy: BatchShape
    buckets: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch."""
        return self.buckets[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size that can occur."""
        if self.policy == "natural":
            return tuple(range(1, self.max_rows + 1))
        return self.buckets if self.policy == "buckets" else self.buckets[-1:]

    def size_for(self, num_rows: int) -> int:
        """The size of a batch of `num_rows` requests, at most `max_rows`."""
        return next(size for size in self.sizes if size >= num_rows)

    def next_smaller(self, num_rows: int) -> int:
        """The most requests for which a batch would be smaller than for `num_rows`; 0 when there is no such size."""
        return max((size for size in self.sizes if size < num_rows), default=0)


def build_batch_shapes(policy: BatchShape, buckets: Sequence[int] | None, max_requests: int) -> BatchShapes:
    """Shapes for batches of up to `max_requests`: of the `buckets` asked for, none larger than that takes.

    By default powers of two, with the largest batch at their end. Buckets that end below `max_requests` bound it.
    """
    if buckets is None:
        powers = [2**i for i in range(max_requests.bit_length()) if 2**i < max_requests]
        return BatchShapes(policy, (*powers, max_requests))
    holding = next((size for size in buckets if size >= max_requests), buckets[-1])
    return BatchShapes(policy, tuple(size for size in buckets if size <= holding))


def choose_burst_length(
    remaining: Sequence[int],
    shapes: BatchShapes,
    *,
    max_burst: int,
    has_eos: bool,
    is_queue_empty: bool,
    is_on_cpu: bool = False,
) -> int:
    """Steps of a burst over rows that may each produce `remaining` (at least 1) more tokens.

    A row that ends earlier goes inactive, so the longest row is the bound; the caps say when to look for others to take
    the place of those that ended, or for a smaller bucket.
    """
    if is_queue_empty:
        cap = _steps_until_smaller_batch(remaining, shapes)
        tail_burst = TAIL_BURST_ON_CPU if is_on_cpu else TAIL_BURST
        cap = min(cap, tail_burst) if has_eos else cap
        cap = max(cap, MIN_BURST)
    else:
        # Without an EOS, no place becomes free before the first row reaches its limit.
        cap = ADMISSION_BURST if has_eos else max(ADMISSION_BURST, min(remaining))
    return min(max_burst, max(remaining), cap)


def _steps_until_smaller_batch(remaining: Sequence[int], shapes: BatchShapes) -> int:
    """Steps after which so many rows have reached their limits that the rest fits in a smaller batch."""
    num_left = shapes.next_smaller(len(remaining))
    return sorted(remaining)[len(remaining) - num_left - 1]
