"""One decode step over the first rows of the static buffers: forward, then advance. Runs as plain calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.sampling import advance


class DecodeForward(Protocol):
    """The forward of one decode step, without host synchronisation; it changes nothing but the cache's pages."""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Next token ids int64 [rows] and their logits float32 [rows].

        For token ids int64 [rows] at positions int32 [rows] (-1: inactive row).
        """

    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The same step's logits [rows, vocab_size]."""


class DecodeStep:
    """The step as plain calls, and what its compiled variants share."""

    # Runs on inactive rows that make a batch size ready.
    num_warm_runs = 0

    def __init__(self, forward: DecodeForward, buffers: DecodeBuffers) -> None:
        self._forward = forward
        self._buffers = buffers
        self._rows: dict[int, DecodeBuffers] = {}

    def session(self, bucket: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """The surroundings in which steps of `bucket` rows run."""
        return torch.no_grad()

    def run(self, bucket: int) -> None:
        """Enqueue one step over the first `bucket` rows, inside a session."""
        run_step(self._forward, self.rows(bucket))

    def warm(self, bucket: int, num_runs: int) -> None:
        """Run steps that change nothing: no row is active in them, and the buffers are put back."""
        with inactive_rows(self._buffers), self.session(bucket):
            for _ in range(num_runs):
                self._buffers.step.zero_()
                self.run(bucket)

    def rows(self, bucket: int) -> DecodeBuffers:
        """The buffers cut to their first `bucket` rows, the same views each time."""
        if bucket not in self._rows:
            self._rows[bucket] = self._cut(bucket)
        return self._rows[bucket]

    def close(self) -> None:
        """Let go of forward and buffers."""
        self._rows.clear()
        del self._forward, self._buffers

    def _cut(self, bucket: int) -> DecodeBuffers:
        return cut_rows(self._buffers, bucket)


def run_step(forward: DecodeForward, rows: DecodeBuffers) -> None:
    """Run one decode step over all of `rows`."""
    next_ids, best_logits = forward(rows.token_ids, rows.positions)
    advance(rows, next_ids, best_logits)


def cut_rows(buffers: DecodeBuffers, num_rows: int) -> DecodeBuffers:
    """Views of what a step reads and writes of the first rows; block tables stay whole."""
    return replace(
        buffers,
        token_ids=buffers.token_ids[:num_rows],
        positions=buffers.positions[:num_rows],
        remaining=buffers.remaining[:num_rows],
        outputs=buffers.outputs[:, :num_rows],
        best_logits=buffers.best_logits[:num_rows],
    )


@contextmanager
def inactive_rows(buffers: DecodeBuffers) -> Iterator[None]:
    """No row is active in the body; afterwards the state of all rows is what it was."""
    with restored_state(buffers):
        buffers.positions.fill_(-1)
        yield


@contextmanager
def restored_state(buffers: DecodeBuffers) -> Iterator[None]:
    """Put back, after the body, all that a step changes in the buffers."""
    rows = (buffers.token_ids, buffers.positions, buffers.remaining, buffers.outputs, buffers.best_logits)
    state = (*rows, buffers.step)
    saved = [tensor.clone() for tensor in state]
    try:
        yield
    finally:
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
