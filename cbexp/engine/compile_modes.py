"""How decode steps run, by the name of a mode: eager, compiled, captured, or both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.compiled_layers import LayerCompiledStep
from cbexp.engine.compiled_step import CompiledStep
from cbexp.engine.compiler_session import CompileOptions
from cbexp.engine.cpp_compiler import find_cpp_compiler_problem
from cbexp.engine.cuda_graphs import GraphReplay
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeForward, DecodeStep
from cbexp.engine.graph_trees import TreeStep
from cbexp.engine.step_loop import StepLoop
from cbexp.engine.types import CompileRegion, EngineError

# Mode -> torch.compile's name of how the step is compiled; None: not at all.
TORCH_MODES: dict[str, str | None] = {
    "eager": None,
    "default": "default",
    "reduce_overhead": "reduce-overhead",
    "max_autotune": "max-autotune",
    "max_autotune_no_cudagraphs": "max-autotune-no-cudagraphs",
    "cuda_graph": None,
    "compiled_cuda_graph": "default",
}
TREE_MODES = ("reduce_overhead", "max_autotune")
CAPTURE_MODES = ("cuda_graph", "compiled_cuda_graph")
GRAPH_MODES = (*TREE_MODES, *CAPTURE_MODES)


class StepRunner(Protocol):
    """Runs decode steps over the first rows of static buffers."""

    @property
    def stats(self) -> CompileStats:
        """What compiling and capturing have taken so far."""

    def prepare(self, bucket: int) -> None:
        """Compile or capture for a batch of `bucket` rows; idempotent, and live rows are left as they are."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue steps of: advance(buffers, *forward(token_ids[:bucket], positions[:bucket]))."""

    def close(self) -> None:
        """Drop what was compiled or captured; the runner is unusable afterwards."""


def build_step_runner(
    forward: DecodeForward,
    buffers: DecodeBuffers,
    mode: str,
    *,
    region: CompileRegion = "model",
    recompile_limit: int | None = None,
    model: nn.Module | None = None,
    stream: torch.cuda.Stream | None = None,
    steps_per_graph: Sequence[int] = (1,),
    is_batch_dynamic: bool = True,
) -> StepRunner:
    """Build what runs decode steps of `forward` in `mode`. Nothing is compiled before `prepare`.

    Args:
        forward: the step's forward; its parameters, like the buffers, must stay at their addresses.
        buffers: static buffers on the model's device.
        mode: a name of `TORCH_MODES`.
        region: "layer" compiles the decoder layers of `model`, one program for all of a class.
        recompile_limit: programs that one compiled function may have; None is PyTorch's own limit.
        model: what `forward` runs, a transformers model where its layers are compiled. Compiled steps do not care
            which of its parameters require gradients.
        stream: where captured graphs run; None is the stream that is current then.
        steps_per_graph: decode steps of one captured graph, one graph for each number; 1 must be among them.
        is_batch_dynamic: False compiles each batch size by itself.

    Raises:
        EngineError: the mode cannot run here: no CUDA device, no compiler, not the main thread, a region that it lacks.
    """
    _check(mode, region, buffers.positions.device)
    stats = CompileStats()
    torch_mode = TORCH_MODES[mode]
    step: DecodeStep
    if torch_mode is None:
        step = DecodeStep(forward, buffers)
    else:
        options = CompileOptions(mode, torch_mode, recompile_limit, is_batch_dynamic)
        step = _build_compiled_step(forward, buffers, options, stats, region, model)
    if mode in CAPTURE_MODES:
        return GraphReplay(step, buffers, mode, stats, stream=stream, steps_per_graph=steps_per_graph)
    return StepLoop(step, buffers, stats)


def _build_compiled_step(
    forward: DecodeForward,
    buffers: DecodeBuffers,
    options: CompileOptions,
    stats: CompileStats,
    region: CompileRegion,
    model: nn.Module | None,
) -> CompiledStep:
    if region == "layer":
        if model is None:
            raise ValueError("region='layer' compiles the layers of a model: pass it as model=.")
        return LayerCompiledStep(forward, buffers, options, stats, model)
    step_class = TreeStep if options.mode in TREE_MODES else CompiledStep
    return step_class(forward, buffers, options, stats, model)


def _check(mode: str, region: CompileRegion, device: torch.device) -> None:
    if mode not in TORCH_MODES:
        raise ValueError(f"mode={mode!r} is not a compile mode: {', '.join(TORCH_MODES)}.")
    if mode in GRAPH_MODES and device.type != "cuda":
        raise EngineError(f"{mode} captures CUDA graphs, and the model is on {device}.")
    if region == "layer" and (TORCH_MODES[mode] is None or mode in TREE_MODES):
        raise EngineError(f"region='layer' does not go with {mode}, which compiles no layers.")
    if TORCH_MODES[mode] is not None:
        _require_torch_compile(mode)
        if device.type == "cpu":
            require_cpp_compiler(mode)


def _require_torch_compile(mode: str) -> None:
    if torch._dynamo.config.disable or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        raise EngineError(
            f"{mode} compiles nothing: torch.compile is switched off in this process (TORCH_COMPILE_DISABLE or "
            "TORCHDYNAMO_DISABLE)."
        )


def require_cpp_compiler(mode: str) -> None:
    """Raise `EngineError` when torch.compile finds no C++ compiler, without which it makes no code for a CPU."""
    problem = find_cpp_compiler_problem()
    if problem is not None:
        raise EngineError(
            f"{mode} compiles C++ for the CPU, and {problem}: install g++ or name one in the environment variable CXX, "
            "or decode eagerly (compile_mode None)."
        )
