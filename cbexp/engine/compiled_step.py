"""Decode steps through torch.compile: one program serves all batch sizes above one, and each compilation is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from cbexp.engine.compile_stats import CompilerCounts, CompileStats, read_compiler_counts
from cbexp.engine.compiler_session import CompileOptions, compile_alone, compiler_session, mark_dynamic
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeForward, DecodeStep, run_step
from cbexp.engine.types import EngineError


class CompiledStep(DecodeStep):
    """Forward and advance as one program. Sizes that are not the batch's stay constants in it.

    A bucket of one row is a program of its own, and so is one of all `max_rows` rows, of which the outputs alone lie
    without gaps: buffers of one row more than the largest bucket spare it.
    """

    num_warm_runs = 1

    def __init__(
        self,
        forward: DecodeForward,
        buffers: DecodeBuffers,
        options: CompileOptions,
        stats: CompileStats,
        model: nn.Module | None,
    ) -> None:
        super().__init__(forward, buffers)
        self._parameters = [] if model is None else list(model.parameters())
        self._options = options
        self._stats = stats
        self._warmed: set[int] = set()
        self._program = self._compile()

    @contextmanager
    def session(self, bucket: int) -> Iterator[None]:
        """As `compiler_session`, with what the compiler does counted."""
        before = read_compiler_counts()
        try:
            with compiler_session(self._options, bucket, self._parameters):
                yield
        finally:
            self._count(bucket, read_compiler_counts() - before)

    def run(self, bucket: int) -> None:
        """Enqueue one step over the first `bucket` rows, inside a session."""
        self._program(self.rows(bucket))

    def warm(self, bucket: int, num_runs: int) -> None:
        """Compile for `bucket` rows; the runs change nothing."""
        start_s = time.perf_counter()
        super().warm(bucket, num_runs)
        self._stats.compile_s += time.perf_counter() - start_s
        if self._stats.programs == 0:
            raise EngineError(
                f"{self._options.mode} compiled nothing: torch.compile is switched off in this process "
                "(TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or a stance)."
            )
        self._warmed.add(bucket)

    def close(self) -> None:
        """Drop the compiled programs."""
        super().close()
        del self._program, self._parameters

    def _compile(self) -> Callable[[DecodeBuffers], None]:
        forward = self._forward

        def step(rows: DecodeBuffers) -> None:
            run_step(forward, rows)

        return compile_alone(step, self._options)

    def _cut(self, bucket: int) -> DecodeBuffers:
        rows = super()._cut(bucket)
        if self._options.is_batch_dynamic:
            for tensor in (rows.token_ids, rows.positions, rows.remaining, rows.best_logits):
                mark_dynamic(tensor, dim=0)
            mark_dynamic(rows.outputs, dim=1)
        return rows

    def _count(self, bucket: int, new: CompilerCounts) -> None:
        self._stats.programs += new.programs
        self._stats.recompiles += new.programs if bucket in self._warmed else 0
        self._stats.graph_breaks += new.graph_breaks
        self._stats.skipped_cudagraphs += new.skipped_cudagraphs
