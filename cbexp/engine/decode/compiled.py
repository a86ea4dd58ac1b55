"""Decode steps through torch.compile: programs that serve all batch sizes, and CUDA graphs that it records itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from cbexp.engine.buffers import ROW_STATE, DecodeBuffers
from cbexp.engine.decode.step import CompileStats, EagerSteps, run_step
from cbexp.engine.forward import Forward
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.operators import declare_operators
from cbexp.engine.types import COMPILE_MODES, EngineError

GRAPH_TREE_SETTINGS = {
    # A skipped graph is an error, and so is a step that does not fit in one graph. (The parts of a partitioned one
    # would stay in modules that Inductor never drops, and with them their memory.)
    "triton.cudagraph_or_error": True,
    "graph_partition": False,
    # Sizes are buckets, as many as were asked for: each gets its graph, without a warning about their number.
    "triton.cudagraph_skip_dynamic_graphs": False,
    "triton.cudagraph_dynamic_shape_warn_limit": None,
}


class CompiledSteps(EagerSteps):
    """Forward and advance as one program. Sizes that are not the batch's stay constants in it.

    A bucket of one row is a program of its own. A bucket of all rows of the buffers would be another, so buffers have
    one row more than the largest bucket. `parameters` are frozen while steps run:
    programs are bound to which of them require gradients. `recompile_limit` None: PyTorch's own.
    """

    num_warm_runs = 1

    def __init__(
        self,
        forward: Forward,
        buffers: DecodeBuffers,
        stats: CompileStats,
        mode: str,
        recompile_limit: int | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(forward, buffers, stats)
        self._mode = mode
        self._recompile_limit = recompile_limit
        self._parameters = parameters
        self._warmed: set[int] = set()
        self._num_programs = 0

        def step(rows: DecodeBuffers) -> None:
            run_step(forward, rows)

        self._program = _compile_alone(step, COMPILE_MODES[mode].torch_mode)

    @contextmanager
    def session(self, bucket: int) -> Iterator[None]:
        """Run compiled steps in the body, counting what the compiler does; `EngineError` for what it cannot compile."""
        # The sizes of another engine's cache in the same process must not make those of this one dynamic.
        settings: dict[str, Any] = {"automatic_dynamic_shapes": False}
        if self._recompile_limit is not None:
            settings["recompile_limit"] = self._recompile_limit
        before = _read_compiler_counts()
        try:
            with (
                torch.no_grad(),
                _frozen(self._parameters),
                torch._dynamo.config.patch(settings),
                self._named_errors(bucket),
            ):
                yield
        finally:
            self._count(bucket, before)

    def step(self, bucket: int) -> None:
        """Enqueue one step over the first `bucket` rows, inside a session."""
        self._program(self.rows(bucket))

    def warm(self, bucket: int, num_runs: int) -> None:
        """Compile for `bucket` rows; the runs change nothing."""
        start_s = time.perf_counter()
        super().warm(bucket, num_runs)
        self.stats.compile_s += time.perf_counter() - start_s
        if self._num_programs == 0:
            raise EngineError(
                f"{self._mode} compiled nothing: torch.compile is switched off in this process "
                "(TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or a stance)."
            )
        self._warmed.add(bucket)

    def close(self) -> None:
        """Drop the compiled programs."""
        super().close()
        del self._program, self._parameters

    def _cut(self, bucket: int) -> DecodeBuffers:
        rows = super()._cut(bucket)
        if bucket > 1:  # PyTorch makes constants of 0 and 1
            for name in ROW_STATE:
                torch._dynamo.mark_dynamic(getattr(rows, name), 0)
            torch._dynamo.mark_dynamic(rows.outputs, 1)
            if rows.sampling is not None:
                torch._dynamo.mark_dynamic(rows.sampling.settings, 0)
                torch._dynamo.mark_dynamic(rows.sampling.seen, 0)
                torch._dynamo.mark_dynamic(rows.sampling.logprobs, 1)
        return rows

    def _count(self, bucket: int, before: _CompilerCounts) -> None:
        now = _read_compiler_counts()
        num_new = now.programs - before.programs
        self._num_programs += num_new
        self.stats.programs += num_new
        self.stats.recompiles += num_new if bucket in self._warmed else 0
        self.stats.graph_breaks += now.graph_breaks - before.graph_breaks
        self.stats.skipped_cudagraphs += now.skipped_cudagraphs - before.skipped_cudagraphs

    @contextmanager
    def _named_errors(self, bucket: int) -> Iterator[None]:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # late: it takes seconds

        failure = f"{self._mode} cannot compile the decode step of {bucket} rows: "
        try:
            yield
        except FailOnRecompileLimitHit as error:
            limit = self._recompile_limit or torch._dynamo.config.recompile_limit
            raise EngineError(f"{failure}recompile_limit={limit} programs are there already.") from error
        except TorchDynamoException as error:
            raise EngineError(failure + " ".join(str(error).split("\n", 2)[:2])) from error


class GraphTreeSteps(CompiledSteps):
    """Compiled steps as cudagraph trees, torch.compile's own CUDA graphs: one graph a batch size, or an error.

    Main thread only: trees keep their graphs in thread-local state. The step has no outputs: all it changes are static
    buffers and the pages, marked as such, since trees skip graphs that change inputs which may move.
    """

    # Trees run the program once, then record it, then replay.
    num_warm_runs = 3

    def __init__(
        self,
        forward: Forward,
        buffers: DecodeBuffers,
        stats: CompileStats,
        mode: str,
        recompile_limit: int | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        _require_main_thread(mode)
        self._static: list[Tensor] = []
        self._num_graphs = 0
        self._mark_static([buffers.step, buffers.eos_ids, *buffers.block_tables.values()])
        if buffers.sampling is not None:
            self._mark_static([buffers.sampling.token_sets, buffers.sampling.key])
        for layer in buffers.layers:
            self._mark_static([layer.pages, layer.page_offset])
        super().__init__(forward, buffers, stats, mode, recompile_limit, parameters)

    @contextmanager
    def session(self, bucket: int) -> Iterator[None]:
        """As for compiled steps, with graphs that must be there: neither skipped nor of a program that is void."""
        _require_main_thread(self._mode)
        num_skipped, num_recompiles = self.stats.skipped_cudagraphs, self.stats.recompiles
        try:
            with super().session(bucket), torch._inductor.config.patch(GRAPH_TREE_SETTINGS):
                yield
        except RuntimeError as error:
            if self.stats.skipped_cudagraphs == num_skipped:
                raise
            raise self._no_graph(bucket, str(error).partition("\n")[0]) from error
        if self.stats.skipped_cudagraphs > num_skipped:
            raise self._no_graph(bucket, "no reason given")
        if self.stats.recompiles > num_recompiles:
            raise self._no_graph(
                bucket, "its step was compiled anew, since something has changed that the program depends on"
            )

    def step(self, bucket: int) -> None:
        """Enqueue one step, a replay once `bucket` is warm."""
        torch.compiler.cudagraph_mark_step_begin()
        super().step(bucket)
        self.stats.replays += bucket in self._warmed

    def warm(self, bucket: int, num_runs: int) -> None:
        """Compile and record for `bucket` rows; the runs change nothing."""
        num_before = self._num_recorded()
        super().warm(bucket, num_runs)
        num_recorded = self._num_recorded() - num_before
        if num_recorded == 0:
            raise self._no_graph(bucket, "none was recorded")
        self.stats.graphs += num_recorded
        self._num_graphs += num_recorded

    def close(self) -> None:
        """Drop the programs, and with them their graphs; the tensors lose their marks."""
        super().close()
        self.stats.graphs -= self._num_graphs
        for tensor in self._static:
            if hasattr(tensor, "_dynamo_static_input_type"):
                del tensor._dynamo_static_input_type
        self._static.clear()

    def _cut(self, bucket: int) -> DecodeBuffers:
        rows = super()._cut(bucket)
        self._mark_static(rows.state())
        if rows.sampling is not None:
            self._mark_static([rows.sampling.settings])
        return rows

    def _mark_static(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            # Unguarded: views of all buckets share their addresses, and the programs.
            torch._dynamo.mark_static_address(tensor, guard=False)
            self._static.append(tensor)

    def _num_recorded(self) -> int:
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(self._buffers.device.index, create_if_none_exists=False)
        if manager is None:
            return 0
        nodes = [node for roots in manager.roots.values() for node in roots]
        for node in nodes:  # grows while it is read
            nodes.extend(child for children in node.children.values() for child in children)
        return len(nodes)

    def _no_graph(self, bucket: int, reason: str) -> EngineError:
        return EngineError(f"{self._mode} promises CUDA graphs and has none for {bucket} rows: {reason}")


@dataclass(frozen=True)
class _CompilerCounts:
    """The process's counts at one moment."""

    programs: int
    graph_breaks: int
    skipped_cudagraphs: int


def _read_compiler_counts() -> _CompilerCounts:
    from torch._dynamo.utils import counters  # late: it takes seconds, and not every mode compiles

    return _CompilerCounts(
        programs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        skipped_cudagraphs=counters["inductor"]["cudagraph_skips"],
    )


def _compile_alone(
    function: Callable[[DecodeBuffers], None], torch_mode: str | None
) -> Callable[[DecodeBuffers], None]:
    """Compile a copy of `function` with a code object of its own.

    Programs and the recompile limit belong to a code object: runners do not share them, and they go with the runner.
    """
    declare_operators()
    original = cast(FunctionType, function)
    copied = FunctionType(
        original.__code__.replace(),
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    return cast(Callable[[DecodeBuffers], None], torch.compile(copied, fullgraph=True, mode=torch_mode))


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    # Those made in inference mode cannot be thawed outside of it.
    trained = [p for p in parameters if p.requires_grad and not p.is_inference()]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        with deferring_interrupts():
            for parameter in trained:
                parameter.requires_grad_(True)


def _require_main_thread(mode: str) -> None:
    """Refuse others: graphs recorded on one thread are not there for another."""
    if threading.current_thread() is not threading.main_thread():
        raise EngineError(
            f"{mode} works on the main thread alone, where torch.compile keeps its CUDA graphs: drive from there, or "
            "use cuda_graph or compiled_cuda_graph."
        )
