"""Runs bursts: rows up to the device, many decode steps without the host, their tokens back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cbexp.engine.batch_shapes import BatchShapes
from cbexp.engine.decode_buffers import DecodeBuffers
from cbexp.engine.page_layout import PagePool
from cbexp.engine.row_upload import DecodeRow, RowUpload
from cbexp.engine.step_runner import StepRunner


@dataclass(frozen=True)
class Burst:
    """A burst that has been submitted: its rows are the first of `bucket`."""

    num_rows: int
    bucket: int
    num_steps: int
    is_fetched: torch.cuda.Event | None


class BurstRunner:
    """Everything runs on the current stream, in order; only `collect` waits for the device. One burst at a time."""

    def __init__(self, buffers: DecodeBuffers, pools: Mapping[str, PagePool], shapes: BatchShapes) -> None:
        self._buffers = buffers
        self._shapes = shapes
        self._upload = RowUpload(buffers, pools)
        self._is_cuda = buffers.outputs.device.type == "cuda"
        self._fetched = torch.empty_like(buffers.outputs, device="cpu", pin_memory=self._is_cuda)
        self._runner: StepRunner
        self._prepared: set[int] = set()

    def use(self, runner: StepRunner) -> None:
        """Run steps by `runner` from now on, over the same buffers."""
        self._runner = runner
        self._prepared = set()

    def prepare(self) -> None:
        """Compile or capture for every batch size, the largest first: smaller ones then fit in its memory."""
        for bucket in reversed(self._shapes.sizes):
            self.prepare_size(bucket)

    def prepare_size(self, bucket: int) -> None:
        """Compile or capture for one batch size, unless that is done."""
        if bucket in self._prepared:
            return
        # Preparing runs steps, and rows of the last burst must not take part in them.
        self._buffers.positions.fill_(-1)
        self._runner.prepare(bucket)
        self._prepared.add(bucket)

    def submit(self, rows: Sequence[DecodeRow], num_steps: int) -> Burst:
        """Start `num_steps` decode steps over `rows`. Rows that end go inactive and stay so."""
        bucket = self._shapes.size_for(len(rows))
        self.prepare_size(bucket)
        self._upload.upload(rows)
        self._runner.run(bucket, num_steps)
        return Burst(len(rows), bucket, num_steps, self._start_fetching(num_steps))

    def collect(self, burst: Burst) -> list[list[int]]:
        """Wait for the burst; the tokens that each of its rows has made."""
        if burst.is_fetched is not None:
            burst.is_fetched.synchronize()
        token_ids = self._fetched[: burst.num_steps, : burst.num_rows].T.contiguous().numpy()
        # A row is active from the first step until it ends.
        counts = (token_ids >= 0).sum(axis=1).tolist()
        return [row[:count].tolist() for row, count in zip(token_ids, counts, strict=True)]

    def _start_fetching(self, num_steps: int) -> torch.cuda.Event | None:
        self._fetched[:num_steps].copy_(self._buffers.outputs[:num_steps], non_blocking=True)
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
