"""Decode steps as cudagraph trees, torch.compile's own CUDA graphs: one graph a batch size, or an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.compiled_step import CompiledStep
from cbexp.engine.compiler_session import CompileOptions
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeForward
from cbexp.engine.types import EngineError

TREE_SETTINGS = {
    # A skipped graph is an error, and so is a step that does not fit in one graph. (The parts of a partitioned one
    # would stay in modules that Inductor never drops, and with them their memory.)
    "triton.cudagraph_or_error": True,
    "graph_partition": False,
    # Sizes are buckets, as many as were asked for: each gets its graph, without a warning about their number.
    "triton.cudagraph_skip_dynamic_graphs": False,
    "triton.cudagraph_dynamic_shape_warn_limit": None,
}


class TreeStep(CompiledStep):
    """A compiled step that trees capture. Main thread only: trees keep their graphs in thread-local state.

    The step has no outputs: all it changes are static buffers and the pages, marked as such, since trees skip graphs
    that change inputs which may move.
    """

    # Trees run the program once, then record it, then replay.
    num_warm_runs = 3

    def __init__(
        self,
        forward: DecodeForward,
        buffers: DecodeBuffers,
        options: CompileOptions,
        stats: CompileStats,
        model: nn.Module | None,
    ) -> None:
        require_main_thread(options.mode)
        self._static: list[Tensor] = []
        for tensor in _fixed_tensors(buffers):
            self._mark_static(tensor)
        super().__init__(forward, buffers, options, stats, model)

    @contextmanager
    def session(self, bucket: int) -> Iterator[None]:
        """As for a compiled step, with graphs that must be there: neither skipped nor of a program that is void."""
        require_main_thread(self._options.mode)
        num_skipped, num_recompiles = self._stats.skipped_cudagraphs, self._stats.recompiles
        try:
            with super().session(bucket), torch._inductor.config.patch(TREE_SETTINGS):
                yield
        except RuntimeError as error:
            if self._stats.skipped_cudagraphs == num_skipped:
                raise
            raise EngineError(self._describe_skip(bucket, str(error).partition("\n")[0])) from error
        if self._stats.skipped_cudagraphs > num_skipped:
            raise EngineError(self._describe_skip(bucket, "no reason given"))
        if self._stats.recompiles > num_recompiles:
            reason = "its step was compiled anew, since something has changed that the program depends on"
            raise EngineError(self._describe_skip(bucket, reason))

    def run(self, bucket: int) -> None:
        """Enqueue one step, a replay once `bucket` is warm."""
        torch.compiler.cudagraph_mark_step_begin()
        super().run(bucket)
        self._stats.replays += bucket in self._warmed

    def warm(self, bucket: int, num_runs: int) -> None:
        """Compile and record for `bucket` rows; the runs change nothing."""
        num_before = self._num_recorded()
        super().warm(bucket, num_runs)
        num_recorded = self._num_recorded() - num_before
        if num_recorded == 0:
            raise EngineError(self._describe_skip(bucket, "none was recorded"))
        self._stats.graphs += num_recorded

    def close(self) -> None:
        """Drop the programs, and with them their graphs; the tensors lose their marks."""
        super().close()
        for tensor in self._static:
            if hasattr(tensor, "_dynamo_static_input_type"):
                del tensor._dynamo_static_input_type
        self._static.clear()

    def _cut(self, bucket: int) -> DecodeBuffers:
        rows = super()._cut(bucket)
        for tensor in (rows.token_ids, rows.positions, rows.remaining, rows.outputs, rows.best_logits):
            self._mark_static(tensor)
        return rows

    def _mark_static(self, tensor: Tensor) -> None:
        # Unguarded: views of all buckets share their addresses, and the programs.
        torch._dynamo.mark_static_address(tensor, guard=False)
        self._static.append(tensor)

    def _num_recorded(self) -> int:
        from torch._inductor.cudagraph_trees import get_manager

        index = self._buffers.positions.device.index
        manager = get_manager(index, create_if_none_exists=False)
        if manager is None:
            return 0
        nodes = [node for roots in manager.roots.values() for node in roots]
        for node in nodes:  # grows while it is read
            nodes.extend(child for children in node.children.values() for child in children)
        return len(nodes)

    def _describe_skip(self, bucket: int, reason: str) -> str:
        return f"{self._options.mode} promises CUDA graphs and has none for {bucket} rows: {reason}"


def require_main_thread(mode: str) -> None:
    """Raise `EngineError` elsewhere: graphs recorded on one thread are not there for another."""
    if threading.current_thread() is not threading.main_thread():
        raise EngineError(
            f"{mode} works on the main thread alone, where torch.compile keeps its CUDA graphs: drive from there, or "
            "use cuda_graph=True with compile_mode None or 'default'."
        )


def _fixed_tensors(buffers: DecodeBuffers) -> list[Tensor]:
    layers = [tensor for layer in buffers.layers for tensor in (layer.pages, layer.page_offset)]
    return [buffers.step, buffers.eos_ids, *buffers.block_tables.values(), *layers]
