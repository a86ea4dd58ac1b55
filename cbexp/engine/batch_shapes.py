"""How many rows a decode step computes for the requests it has: the shape policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbexp.engine.types import BatchShape


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
