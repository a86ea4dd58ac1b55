"""Decode steps through torch.compile: one program serves all batch sizes above one, and each compilation is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from cbexp.engine.compile_stats import CompilerCounts, CompileStats, read_compiler_counts
from cbexp.engine.decode_buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeForward, DecodeStep, run_step
from cbexp.engine.types import EngineError

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class CompileOptions:
    """How a step is compiled.

    `mode` is the name in messages, `torch_mode` torch.compile's. `recompile_limit` None: PyTorch's own.
    `is_batch_dynamic` False: each batch size is a program of its own.
    """

    mode: str
    torch_mode: str
    recompile_limit: int | None
    is_batch_dynamic: bool


class CompiledStep(DecodeStep):
    """Forward and advance as one program. Sizes that are not the batch's stay constants in it.

    A bucket of one row is a program of its own, and so is one of all `max_rows` rows, of which the outputs alone lie
    without gaps: buffers of one row more than the largest bucket spare it.
    """

    num_warm_runs = 1

    def __init__(
        self, forward: DecodeForward, buffers: DecodeBuffers, options: CompileOptions, stats: CompileStats
    ) -> None:
        super().__init__(forward, buffers)
        self._options = options
        self._stats = stats
        self._warmed: set[int] = set()
        self._program = self._compile()

    @contextmanager
    def session(self, bucket: int) -> Iterator[None]:
        """Set the compiler up, count what it does, and raise `EngineError` for what it cannot do."""
        before = read_compiler_counts()
        try:
            with torch.no_grad(), _dynamo_settings(self._options), self._named_errors(bucket):
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
        del self._program

    def _compile(self) -> Callable[[DecodeBuffers], None]:
        forward = self._forward

        def step(rows: DecodeBuffers) -> None:
            run_step(forward, rows)

        return compile_alone(step, self._options)

    def _cut(self, bucket: int) -> DecodeBuffers:
        rows = super()._cut(bucket)
        if self._options.is_batch_dynamic:
            for tensor in (rows.token_ids, rows.positions, rows.remaining):
                mark_dynamic(tensor, dim=0)
            mark_dynamic(rows.outputs, dim=1)
        return rows

    def _count(self, bucket: int, new: CompilerCounts) -> None:
        self._stats.programs += new.programs
        self._stats.recompiles += new.programs if bucket in self._warmed else 0
        self._stats.graph_breaks += new.graph_breaks
        self._stats.skipped_cudagraphs += new.skipped_cudagraphs

    @contextmanager
    def _named_errors(self, bucket: int) -> Iterator[None]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as error:
            raise EngineError(
                f"{self._options.mode} cannot compile the decode step of {bucket} rows: {error}"
            ) from error


def compile_alone(function: _Function, options: CompileOptions) -> _Function:
    """Compile a copy of `function` with a code object of its own.

    Programs and the recompile limit belong to a code object: runners do not share them, and they go with the runner.
    """
    copied = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return cast(_Function, torch.compile(copied, fullgraph=True, mode=options.torch_mode))


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let one program serve every size of `dim` above one; PyTorch makes constants of 0 and 1."""
    if tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)


@contextmanager
def _dynamo_settings(options: CompileOptions) -> Iterator[None]:
    # The sizes of another engine's cache in the same process must not make those of this one dynamic.
    settings: dict[str, Any] = {"automatic_dynamic_shapes": False}
    if options.recompile_limit is not None:
        settings["recompile_limit"] = options.recompile_limit
    with torch._dynamo.config.patch(settings):
        yield
