"""Decode steps as CUDA graphs of our own: captured for a batch size, all in one memory pool, and replayed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeStep
from cbexp.engine.step_loop import StepLoop, describe_unprepared
from cbexp.engine.types import EngineError

# Kernels load, tune and allocate their workspaces in the first runs, which must not happen inside a capture.
MIN_WARM_RUNS = 2


class GraphReplay(StepLoop):
    """Runs steps by replay, on `stream` or else the stream that is current.

    `steps_per_graph`: how many steps a graph of each batch size holds, one graph for each number; a burst takes the
    largest that fits what is left of it, so 1 must be among them. Prepare the largest batch size first: the smaller
    ones then fit in the memory of its intermediate results.
    """

    def __init__(
        self,
        step: DecodeStep,
        buffers: DecodeBuffers,
        mode: str,
        stats: CompileStats,
        *,
        stream: torch.cuda.Stream | None,
        steps_per_graph: Sequence[int],
    ) -> None:
        if 1 not in steps_per_graph or max(steps_per_graph) > buffers.max_burst:
            raise ValueError(
                f"steps_per_graph={tuple(steps_per_graph)} must have 1 and end at max_burst={buffers.max_burst}."
            )
        super().__init__(step, buffers, stats)
        self._mode = mode
        self._device = buffers.positions.device
        self._stream = stream
        self._capture_stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._lengths = sorted(steps_per_graph, reverse=True)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue `num_steps` steps; `prepare(bucket)` must have been called."""
        if bucket not in self._graphs:
            raise EngineError(describe_unprepared(bucket))
        with self._on_stream():
            for length, graph in zip(self._lengths, self._graphs[bucket], strict=True):
                num_replays, num_steps = divmod(num_steps, length)
                for _ in range(num_replays):
                    graph.replay()
                self._stats.replays += num_replays

    def close(self) -> None:
        """Drop the graphs, and with the last of them their memory pool."""
        torch.cuda.synchronize(self._device)
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.reset()
        self._graphs.clear()
        self._stats.graphs = 0
        super().close()

    def _make_ready(self, bucket: int) -> None:
        start_s, compile_s = time.perf_counter(), self._stats.compile_s
        with self._on_stream(), self._on_capture_stream():
            self._step.warm(bucket, max(MIN_WARM_RUNS, self._step.num_warm_runs))
            self._graphs[bucket] = [self._capture(bucket, length) for length in self._lengths]
        self._stats.graphs += len(self._lengths)
        self._stats.capture_s += time.perf_counter() - start_s - (self._stats.compile_s - compile_s)

    def _capture(self, bucket: int, num_steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a CUDA call of another thread, a logger's say, would end a global capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
        )
        with self._named_errors(bucket), self._step.session(bucket), capture:
            for _ in range(num_steps):
                self._step.run(bucket)
        return graph

    @contextmanager
    def _named_errors(self, bucket: int) -> Iterator[None]:
        try:
            yield
        except (EngineError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise EngineError(
                f"{self._mode} cannot capture the decode step of {bucket} rows: {error}"
            ) from error

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

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
