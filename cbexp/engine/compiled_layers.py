"""Regional compilation: a decoder layer is compiled once and serves all layers of its class, in decode steps alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.compiled_step import CompiledStep
from cbexp.engine.compiler_session import CompileOptions, compile_alone, mark_dynamic
from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.decode_step import DecodeForward, run_step
from cbexp.engine.types import UnsupportedModelError


class LayerCompiledStep(CompiledStep):
    """The step as plain calls around compiled layers, which are in place only while steps run."""

    def __init__(
        self,
        forward: DecodeForward,
        buffers: DecodeBuffers,
        options: CompileOptions,
        stats: CompileStats,
        model: nn.Module,
    ) -> None:
        self._layers = find_decoder_layers(model)
        super().__init__(forward, buffers, options, stats, model)

    @contextmanager
    def session(self, bucket: int) -> Iterator[None]:
        """As for a compiled step, with the layers in place."""
        marks_batch = self._options.is_batch_dynamic and bucket not in self._warmed
        with super().session(bucket), _patched(self._layers, self._programs, marks_batch):
            yield

    def close(self) -> None:
        """Drop the compiled layers."""
        super().close()
        del self._layers
        self._programs.clear()

    def _compile(self) -> Callable[[DecodeBuffers], None]:
        layer_classes = {type(layer) for layer in self._layers}
        self._programs = {cls: _compile_layer_class(cls, self._options) for cls in layer_classes}
        forward = self._forward
        return lambda rows: run_step(forward, rows)


class _ToldAttention:
    """Stands in for the cache in one layer, whose index it never looks at: that would be a constant of the program."""

    def __init__(self, cache: Any, layer_index: int) -> None:
        self._told: dict[str, Any] = {}
        cache.update(None, None, layer_index, kwargs=self._told)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Do what the cache does for the layer."""
        kwargs.update(self._told)
        return key_states, value_states

    @property
    def values(self) -> tuple[Any, ...]:
        """What attention is told."""
        return tuple(self._told.values())


def find_decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder layers of a transformers model, in order.

    Raises `UnsupportedModelError` when there are none, or when a layer's forward is not its class's own.
    """
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    layers = next((tuple(stack) for stack in stacks if all(map(_is_decoder_layer, stack))), ())
    if not layers:
        raise UnsupportedModelError(
            f"compile_region='layer' finds no list of decoder layers in {type(model).__name__}: use 'model'."
        )
    for index, layer in enumerate(layers):
        if "forward" in vars(layer):
            raise UnsupportedModelError(
                f"compile_region='layer' compiles the forward of {type(layer).__name__}, and layer {index} has another "
                "one set on it (by a dispatching or quantising wrapper?): use 'model'."
            )
    return layers


def _is_decoder_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) or type(module).__name__.endswith("DecoderLayer")


def _compile_layer_class(layer_class: type[nn.Module], options: CompileOptions) -> Callable[..., Any]:
    forward: Any = layer_class.forward

    def run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, *args, **kwargs)

    return compile_alone(run_layer, options)


@contextmanager
def _patched(
    layers: Sequence[nn.Module], programs: dict[type[nn.Module], Callable[..., Any]], marks_batch: bool
) -> Iterator[None]:
    for index, layer in enumerate(layers):
        layer.forward = _bind(layer, index, programs[type(layer)], marks_batch)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _bind(layer: nn.Module, index: int, program: Callable[..., Any], marks_batch: bool) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, *args: Any, cache: Any, **kwargs: Any) -> Any:
        told = _ToldAttention(cache, index)
        if hidden_states.requires_grad:
            # Gradient checkpointing has a hook on the embedding; a program is bound to what requires gradients.
            hidden_states = hidden_states.detach()
        if marks_batch:
            _mark_batch(hidden_states.shape[0], (hidden_states, args, kwargs, told.values))
        return program(layer, hidden_states, *args, cache=told, **kwargs)

    return forward


def _mark_batch(num_rows: int, values: Any) -> None:
    """Mark the first dimension of all tensors that have a row for each of the batch."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_rows:
            mark_dynamic(value, dim=0)
