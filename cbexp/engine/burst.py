"""Runs bursts: rows up to the device, many decode steps without the host, their tokens back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cbexp.engine.batch_shapes import BatchShapes
from cbexp.engine.decode_buffers import DecodeBuffers
from cbexp.engine.page_layout import PagePool
from cbexp.engine.row_upload import DecodeRow, RowUpload


class StepRunner(Protocol):
    """What a burst asks of whoever runs decode steps (see `compile_modes`)."""

    def prepare(self, bucket: int) -> None:
        """Compile or capture for a batch of `bucket` rows; idempotent."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue decode steps over the first `bucket` rows of the buffers, without waiting for the device."""

    def close(self) -> None:
        """Drop what was captured."""


@dataclass(frozen=True)
class Burst:
    """A burst that has been submitted: its rows are the first of `bucket`."""

    num_rows: int
    bucket: int
    num_steps: int
    is_fetched: torch.cuda.Event | None


class BurstRunner:
    """Everything runs on the current stream, in order; only `collect` waits for the device. One burst at a time."""

    def __init__(
        self,
        runner: StepRunner,
        buffers: DecodeBuffers,
        pools: Mapping[str, PagePool],
        shapes: BatchShapes,
    ) -> None:
        self._runner = runner
        self._buffers = buffers
        self._shapes = shapes
        self._upload = RowUpload(buffers, pools)
        self._is_cuda = buffers.outputs.device.type == "cuda"
        self._fetched = torch.empty_like(buffers.outputs, device="cpu", pin_memory=self._is_cuda)
        self._prepared: set[int] = set()

    def prepare(self) -> None:
        """Compile or capture for every batch size, the largest first: smaller ones then fit in its memory."""
        for bucket in reversed(self._shapes.sizes):
            self._prepare(bucket)

    def submit(self, rows: Sequence[DecodeRow], num_steps: int) -> Burst:
        """Start `num_steps` decode steps over `rows`. Rows that end go inactive and stay so."""
        bucket = self._shapes.size_for(len(rows))
        self._prepare(bucket)
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

    def close(self) -> None:
        """Drop what was captured."""
        self._runner.close()

    def _prepare(self, bucket: int) -> None:
        if bucket in self._prepared:
            return
        # Preparing runs steps, and rows of the last burst must not take part in them.
        self._buffers.positions.fill_(-1)
        self._runner.prepare(bucket)
        self._prepared.add(bucket)

    def _start_fetching(self, num_steps: int) -> torch.cuda.Event | None:
        self._fetched[:num_steps].copy_(self._buffers.outputs[:num_steps], non_blocking=True)
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
