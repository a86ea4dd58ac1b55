"""What runs decode steps in each compile mode, and CUDA graphs of our own: captured for a batch size, replayed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode.compiled import CompiledSteps, GraphTreeSteps
from cbexp.engine.decode.step import CompileStats, EagerSteps, StepRunner
from cbexp.engine.forward import Forward
from cbexp.engine.support import require_cpp_compiler
from cbexp.engine.types import COMPILE_MODES, EngineError

# Kernels load, tune and allocate their workspaces in the first runs, which must not happen inside a capture.
MIN_WARM_RUNS = 2


def build_runner(
    forward: Forward,
    buffers: DecodeBuffers,
    mode: str,
    *,
    stats: CompileStats | None = None,
    recompile_limit: int | None = None,
    parameters: Sequence[nn.Parameter] = (),
) -> StepRunner:
    """Build what runs decode steps of `forward` in `mode`, a name of `COMPILE_MODES`. Nothing is compiled yet.

    What `forward` reads must stay at its address, as the buffers do. `parameters` are those of its model. `stats`: what
    the runner counts in, when others have counted before it.

    Raises:
        EngineError: the mode cannot run here: no CUDA device, no compiler, not the main thread.
    """
    torch_mode, graphs = COMPILE_MODES[mode].torch_mode, COMPILE_MODES[mode].graphs
    if graphs is not None and buffers.device.type != "cuda":
        raise EngineError(f"{mode} captures CUDA graphs, and the model is on {buffers.device}.")
    stats = stats or CompileStats()
    steps: EagerSteps
    if torch_mode is None:
        steps = EagerSteps(forward, buffers, stats)
    else:
        _check_compiler(mode, buffers.device)
        steps_class = GraphTreeSteps if graphs == "torch" else CompiledSteps
        steps = steps_class(forward, buffers, stats, mode, recompile_limit, parameters)
    return GraphRunner(steps, buffers.device, mode) if graphs == "engine" else steps


class GraphRunner:
    """A `StepRunner` by replay of captured steps, on the stream that is current.

    All graphs share a memory pool. Prepare the largest batch size first: the smaller ones then fit in the memory of its
    intermediate results.
    """

    def __init__(self, steps: EagerSteps, device: torch.device, mode: str) -> None:
        self._steps = steps
        self._device = device
        self._mode = mode
        # The current one: cuBLAS keeps a workspace for each stream that multiplies. Only the default stream cannot be
        # captured.
        stream = torch.cuda.current_stream(device)
        is_default = stream == torch.cuda.default_stream(device)
        self._capture_stream = torch.cuda.Stream(device) if is_default else stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.stats = steps.stats

    def prepare(self, bucket: int) -> None:
        """As `StepRunner`. Raises `EngineError` when the step cannot be captured."""
        start_s, compile_s = time.perf_counter(), self.stats.compile_s
        with torch.cuda.device(self._device), self._on_capture_stream():
            self._steps.warm(bucket, max(MIN_WARM_RUNS, self._steps.num_warm_runs))
            self._graphs[bucket] = self._capture(bucket)
        self.stats.graphs += 1
        self.stats.capture_s += time.perf_counter() - start_s - (self.stats.compile_s - compile_s)

    def run(self, bucket: int, num_steps: int) -> None:
        """As `StepRunner`."""
        graph = self._graphs[bucket]
        with torch.cuda.device(self._device):
            for _ in range(num_steps):
                graph.replay()
        self.stats.replays += num_steps

    def close(self) -> None:
        """Drop the graphs, and with the last of them their memory pool."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs.values():
            graph.reset()
        self.stats.graphs -= len(self._graphs)
        self._graphs.clear()
        self._steps.close()

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a CUDA call of another thread, a logger's say, would end a global capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
        )
        try:
            with self._steps.session(bucket), capture:
                self._steps.step(bucket)
        except (EngineError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise EngineError(
                f"{self._mode} cannot capture the decode step of {bucket} rows: {error}"
            ) from error
        return graph

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        """Run the body on the capture stream, in order with what comes before and after it on the current one."""
        current = torch.cuda.current_stream(self._device)
        self._capture_stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._capture_stream):
                yield
        finally:
            current.wait_stream(self._capture_stream)


def _check_compiler(mode: str, device: torch.device) -> None:
    if torch._dynamo.config.disable or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise EngineError(
            f"{mode} compiles nothing: torch.compile is switched off in this process (TORCH_COMPILE_DISABLE or "
            "TORCHDYNAMO_DISABLE)."
        )
    if device.type == "cpu":
        require_cpp_compiler(mode)
