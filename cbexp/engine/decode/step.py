"""One decode step over the first rows of the static buffers: a forward, and its end. Runs steps as plain calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.forward import Forward
from cbexp.engine.sampling import finish_step


@dataclass
class CompileStats:
    """What compiling and capturing took; runners count on where those before them ended. Seconds are host time.

    `programs`: functions that torch.compile built. `recompiles`: programs built again for a batch size that had one.
    `graphs`: CUDA graphs held now; `replays`: how often one ran in a burst. `skipped_cudagraphs`: graphs that
    torch.compile gave up (fatal where a mode promises them).
    """

    programs: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    skipped_cudagraphs: int = 0
    graphs: int = 0
    replays: int = 0
    compile_s: float = 0.0
    capture_s: float = 0.0


class StepRunner(Protocol):
    """Runs decode steps over the first rows of static buffers."""

    stats: CompileStats

    def prepare(self, bucket: int) -> None:
        """Compile or capture for a batch of `bucket` rows; live rows are left as they are. Once for each size."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue `num_steps` steps over a bucket that is prepared."""

    def close(self) -> None:
        """Drop what was compiled or captured; the runner is unusable afterwards."""


def run_step(forward: Forward, rows: DecodeBuffers) -> None:
    """Run one decode step over all of `rows`."""
    finish_step(rows, forward(rows.token_ids, rows.positions))


@contextmanager
def inactive_rows(buffers: DecodeBuffers) -> Iterator[None]:
    """No row is active in the body; afterwards the state of all rows is what it was."""
    with buffers.saved():
        buffers.clear()
        yield


class EagerSteps:
    """A `StepRunner` of plain calls, and what its compiled variants share."""

    # Steps over inactive rows that make a batch size ready.
    num_warm_runs = 0

    def __init__(self, forward: Forward, buffers: DecodeBuffers, stats: CompileStats) -> None:
        self._forward = forward
        self._buffers = buffers
        self._rows: dict[int, DecodeBuffers] = {}
        self.stats = stats

    def prepare(self, bucket: int) -> None:
        """As `StepRunner`. Raises `EngineError` when the mode cannot run this step."""
        if self.num_warm_runs:
            self.warm(bucket, self.num_warm_runs)

    def run(self, bucket: int, num_steps: int) -> None:
        """As `StepRunner`; each step is launched by the host."""
        with self.session(bucket):
            for _ in range(num_steps):
                self.step(bucket)

    def session(self, bucket: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """The surroundings in which steps of `bucket` rows run."""
        return torch.no_grad()

    def step(self, bucket: int) -> None:
        """Enqueue one step over the first `bucket` rows, inside a session."""
        run_step(self._forward, self.rows(bucket))

    def warm(self, bucket: int, num_runs: int) -> None:
        """Run steps that change nothing: no row is active in them, and the buffers are put back."""
        with inactive_rows(self._buffers), self.session(bucket):
            for _ in range(num_runs):
                self._buffers.step.zero_()
                self.step(bucket)

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
        return self._buffers.rows(bucket)
