"""Times the device: how long decode steps take alone, and how long it waits for the host between them."""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from cbexp.engine.buffers import DecodeBuffers, SamplingColumn
from cbexp.engine.decode.step import StepRunner
from cbexp.engine.decode.synthetic_rows import fill_free_pages
from cbexp.engine.types import EngineError

Span = tuple[torch.cuda.Event, torch.cuda.Event]


class DeviceIdle:
    """Adds up spans as busy time, and as idle time what lies between one's end and the next one's start.

    A span is busy from its first event to its last: gaps between its kernels are not seen. Events are read once they
    are over, so that measuring never waits.
    """

    def __init__(self) -> None:
        self._busy_ms = 0.0
        self._idle_ms = 0.0
        self._last_end: torch.cuda.Event | None = None
        self._unread: deque[Span | None] = deque()

    @property
    def share(self) -> float | None:
        """Idle time as a share of both, in [0, 1]; None when nothing was measured."""
        self._read()
        total_ms = self._busy_ms + self._idle_ms
        return self._idle_ms / total_ms if total_ms > 0 else None

    def begin(self) -> None:
        """Leave out what passes until the next span: a drive begins."""
        self._unread.append(None)
        self._read()

    def add(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Count a span by its events, recorded in the order of all others and made to be timed."""
        self._unread.append((start, end))
        self._read()

    def _read(self) -> None:
        while self._unread and (self._unread[0] is None or self._unread[0][1].query()):
            span = self._unread.popleft()
            if span is None:
                self._last_end = None
            else:
                self._count(*span)

    def _count(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        if self._last_end is not None:
            self._idle_ms += self._last_end.elapsed_time(start)
        self._busy_ms += start.elapsed_time(end)
        self._last_end = end


@torch.no_grad()
def time_decode_steps(
    runner: StepRunner,
    buffers: DecodeBuffers,
    *,
    bucket: int,
    context: int,
    num_steps: int,
    vocab_size: int,
    max_positions: int,
    num_bursts: int = 7,
) -> list[float]:
    """Return the mean seconds of a step in each of `num_bursts` bursts of `num_steps`, after one that is not counted.

    Every row of the bucket is active and attends to `context` tokens in the middle of a burst, in pages of its own that
    hold random keys and values. Time is the device's, between events on the current stream; on a CPU it is the host's.
    The cache must be idle: what its free blocks hold is overwritten, while the buffers are as before afterwards.

    Raises:
        EngineError: buffers or cache are too small for the rows, or the model has too few positions.
    """
    if not 1 <= num_steps <= buffers.max_burst:
        raise EngineError(
            f"num_steps={num_steps} must be from 1 to {buffers.max_burst}, which the decode buffers hold."
        )
    first_position = max(0, context - 1 - num_steps // 2)
    if first_position + num_steps > max_positions:
        raise EngineError(
            f"context={context} with num_steps={num_steps} in its middle takes {first_position + num_steps} positions, "
            f"and the model has {max_positions}: lower one of them."
        )
    token_ids = torch.arange(bucket) % vocab_size
    seconds = []
    with buffers.saved():
        fill_free_pages(buffers, bucket, first_position + num_steps)
        for _ in range(1 + num_bursts):
            _place_rows(buffers, token_ids, first_position, num_steps)
            seconds.append(_time_burst(runner, buffers.device, bucket, num_steps))
    return seconds[1:]


def _place_rows(buffers: DecodeBuffers, token_ids: Tensor, first_position: int, num_steps: int) -> None:
    """Put a row for each token where a burst starts."""
    num_rows = len(token_ids)
    buffers.clear()
    buffers.token_ids[:num_rows].copy_(token_ids)
    buffers.positions[:num_rows].fill_(first_position)
    buffers.remaining[:num_rows].fill_(num_steps + 1)  # no row ends
    buffers.eos_ids.fill_(-1)
    if buffers.sampling is not None:
        buffers.sampling.settings[:, SamplingColumn.STOP_SET] = 0


def _time_burst(runner: StepRunner, device: torch.device, bucket: int, num_steps: int) -> float:
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
