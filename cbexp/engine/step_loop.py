"""Runs decode steps one after the other, each launched by the host."""

from __future__ import annotations

from dataclasses import replace

from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeStep
from cbexp.engine.types import EngineError


class StepLoop:
    """A `StepRunner` over one kind of step."""

    def __init__(self, step: DecodeStep, buffers: DecodeBuffers, stats: CompileStats) -> None:
        self._step = step
        self._max_rows = buffers.max_rows
        self._stats = stats
        self._prepared: set[int] = set()

    @property
    def stats(self) -> CompileStats:
        """What compiling and capturing have taken so far."""
        return replace(self._stats)

    def prepare(self, bucket: int) -> None:
        """Compile or capture for a batch of `bucket` rows; live rows are left as they are. Idempotent.

        Raises `EngineError` when the mode cannot run this step.
        """
        if not 1 <= bucket <= self._max_rows:
            raise ValueError(f"A batch of {bucket} rows is outside of the buffers' 1 to {self._max_rows}.")
        if bucket not in self._prepared:
            self._make_ready(bucket)
            self._prepared.add(bucket)

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue `num_steps` steps; `prepare(bucket)` must have been called."""
        if bucket not in self._prepared:
            raise EngineError(describe_unprepared(bucket))
        with self._step.session(bucket):
            for _ in range(num_steps):
                self._step.run(bucket)

    def close(self) -> None:
        """Drop what was compiled or captured; the runner is unusable afterwards."""
        self._prepared.clear()
        self._step.close()

    def _make_ready(self, bucket: int) -> None:
        if self._step.num_warm_runs:
            self._step.warm(bucket, self._step.num_warm_runs)


def describe_unprepared(bucket: int) -> str:
    """The message for steps of a batch size that was not prepared."""
    return f"A batch of {bucket} rows was not prepared: call prepare({bucket}) first."
