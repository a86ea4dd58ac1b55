"""Runs bursts: rows up to the device, many decode steps without the host, their tokens back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cbexp.engine.batch_shapes import BatchShapes
from cbexp.engine.compile_modes import StepRunner
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.device_idle import DeviceIdle
from cbexp.engine.buffers import PagePool
from cbexp.engine.buffers import DecodeRow, RowUpload


@dataclass(frozen=True)
class Burst:
    """A burst that has been submitted: its rows are the first of `bucket`.

    `events` (CUDA only): before its first step, and when its tokens are on the host.
    """

    num_rows: int
    bucket: int
    num_steps: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class BurstRunner:
    """Everything runs on the current stream, in order; only `collect` waits for the device. One burst at a time.

    `idle` measures how long the device waited for the host.
    """

    def __init__(self, buffers: DecodeBuffers, pools: Mapping[str, PagePool], shapes: BatchShapes) -> None:
        self._buffers = buffers
        self._shapes = shapes
        self._upload = RowUpload(buffers, pools)
        self._is_cuda = buffers.outputs.device.type == "cuda"
        self._fetched = torch.empty_like(buffers.outputs, device="cpu", pin_memory=self._is_cuda)
        self._runner: StepRunner
        self._check: Callable[[int], object]
        self._prepared: set[int] = set()
        self.idle = DeviceIdle()

    def use(self, runner: StepRunner, check: Callable[[int], object]) -> None:
        """Run steps by `runner` from now on, over the same buffers; `check` each batch size once it is prepared."""
        self._runner = runner
        self._check = check
        self._prepared = set()

    def prepare(self) -> None:
        """Prepare every batch size, the largest first: smaller ones then fit in its memory."""
        for bucket in reversed(self._shapes.sizes):
            self.prepare_size(bucket)

    def prepare_size(self, bucket: int) -> None:
        """Compile or capture for one batch size and check it, unless that is done; live rows are left as they are."""
        if bucket not in self._prepared:
            self._runner.prepare(bucket)
            self._check(bucket)
            self._prepared.add(bucket)

    def submit(self, rows: Sequence[DecodeRow], num_steps: int) -> Burst:
        """Start `num_steps` decode steps over `rows`. Rows that end go inactive and stay so."""
        bucket = self._shapes.size_for(len(rows))
        self.prepare_size(bucket)
        self._upload.upload(rows)
        start = self._record_event()
        self._runner.run(bucket, num_steps)
        self._fetched[:num_steps].copy_(self._buffers.outputs[:num_steps], non_blocking=True)
        end = self._record_event()
        events = None if start is None or end is None else (start, end)
        return Burst(len(rows), bucket, num_steps, events)

    @contextmanager
    def timing_batch(self) -> Iterator[None]:
        """Count what the body puts on the current stream, a batch that is no burst, as the device's work."""
        start = self._record_event()
        yield
        end = self._record_event()
        if start is not None and end is not None:
            self.idle.add(start, end)

    def collect(self, burst: Burst) -> list[list[int]]:
        """Wait for the burst; the tokens that each of its rows has made."""
        if burst.events is not None:
            start, end = burst.events
            end.synchronize()
            self.idle.add(start, end)
        token_ids = self._fetched[: burst.num_steps, : burst.num_rows].T.contiguous().numpy()
        # A row is active from the first step until it ends.
        counts = (token_ids >= 0).sum(axis=1).tolist()
        return [row[:count].tolist() for row, count in zip(token_ids, counts, strict=True)]

    def _record_event(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
