"""Times decode steps alone, without prompts or a scheduler: fills an idle engine's buffers and restores them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.buffers import PagePool
from cbexp.engine.types import EngineError

NUM_TRASH_SECTORS = 2


class RunsSteps(Protocol):
    """What is timed (a `StepRunner`, prepared for the bucket)."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue decode steps over the first `bucket` rows of the buffers on the current stream."""


@torch.no_grad()
def time_decode_steps(
    runner: RunsSteps,
    buffers: DecodeBuffers,
    pools: Mapping[str, PagePool],
    *,
    bucket: int,
    context: int,
    num_steps: int,
    num_bursts: int = 7,
) -> list[float]:
    """Return the mean seconds of a step in each of `num_bursts` bursts of `num_steps`, after one that is not counted.

    Every row of the bucket is active and attends to `context` tokens in the middle of a burst, in pages of its own that
    hold random keys and values. Time is the device's, between events on the current stream; on a CPU it is the host's.
    The cache must be idle: what its free blocks hold is overwritten, while the buffers are as before afterwards.
    `pools` are those that the buffers were made for.

    Raises:
        EngineError: buffers or cache are too small for the rows.
    """
    _check_rows(buffers, bucket, num_steps)
    with _synthetic_rows(buffers, pools, bucket, context, num_steps) as restart:
        seconds = []
        for _ in range(1 + num_bursts):
            restart()
            seconds.append(_time_burst(runner, buffers.positions.device, bucket, num_steps))
    return seconds[1:]


def _check_rows(buffers: DecodeBuffers, bucket: int, num_steps: int) -> None:
    for name, value, most in (
        ("bucket", bucket, buffers.max_rows),
        ("num_steps", num_steps, buffers.max_burst),
    ):
        if not 1 <= value <= most:
            raise EngineError(f"{name}={value} must be from 1 to {most}, which the decode buffers hold.")


def _time_burst(runner: RunsSteps, device: torch.device, bucket: int, num_steps: int) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        runner.run(bucket, num_steps)
        return (time.perf_counter() - start_s) / num_steps
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    runner.run(bucket, num_steps)
    end.record()
    torch.cuda.synchronize(device)
    burst_s: float = start.elapsed_time(end) / 1000
    return burst_s / num_steps


@contextmanager
def _synthetic_rows(
    buffers: DecodeBuffers, pools: Mapping[str, PagePool], num_rows: int, context: int, num_steps: int
) -> Iterator[Callable[[], None]]:
    """Yield a function that puts the rows where a burst starts."""
    first_position = max(0, context - 1 - num_steps // 2)
    saved = [(tensor, tensor.clone()) for tensor in _state_tensors(buffers)]
    try:
        _assign_pages(buffers, pools, num_rows, first_position + num_steps)
        yield lambda: _place_rows(buffers, num_rows, first_position, num_steps)
    finally:
        for tensor, before in saved:
            tensor.copy_(before)


def _state_tensors(buffers: DecodeBuffers) -> list[Tensor]:
    state = [buffers.token_ids, buffers.positions, buffers.remaining, buffers.eos_ids]
    return [*state, buffers.outputs, buffers.best_logits, buffers.step, *buffers.block_tables.values()]


def _place_rows(buffers: DecodeBuffers, num_rows: int, first_position: int, num_steps: int) -> None:
    buffers.token_ids[:num_rows].copy_(torch.arange(num_rows))
    buffers.positions.fill_(-1)
    buffers.positions[:num_rows].fill_(first_position)
    buffers.remaining[:num_rows].fill_(num_steps + 1)  # no row ends
    buffers.eos_ids.fill_(-1)
    buffers.step.zero_()


def _assign_pages(
    buffers: DecodeBuffers, pools: Mapping[str, PagePool], num_rows: int, num_tokens: int
) -> None:
    """Give every row blocks of its own in each pool. Pools share the cache by whole sectors."""
    sector = NUM_TRASH_SECTORS
    for name, pool in pools.items():
        blocks_per_row = _blocks_per_row(pool, num_tokens)
        num_blocks = num_rows * blocks_per_row
        # The write trash is the second sector, so that its first page is the length of one.
        start = sector * pool.trash_page
        end = start + num_blocks * pool.pages_per_block
        if end > pool.pages.shape[0]:
            raise EngineError(
                f"{num_rows} rows of {num_tokens} tokens do not fit in the cache: raise num_blocks "
                f"({name} needs {num_blocks} blocks)."
            )
        pool.pages[start:end].normal_()
        entries = torch.arange(start, end, pool.pages_per_block, dtype=torch.int32)
        buffers.block_tables[name][:num_rows, :blocks_per_row].copy_(entries.view(num_rows, blocks_per_row))
        sector += math.ceil((end - start) / pool.trash_page)


def _blocks_per_row(pool: PagePool, num_tokens: int) -> int:
    """Blocks of a row; a sliding pool's ring holds its window and no more."""
    num_stored = min(num_tokens, pool.window) if pool.window else num_tokens
    num_blocks = math.ceil(num_stored / pool.pages.shape[1])
    if num_blocks > pool.table_width:
        raise EngineError(
            f"a row of {num_tokens} tokens takes {num_blocks} blocks, and the block table holds {pool.table_width}."
        )
    return num_blocks
