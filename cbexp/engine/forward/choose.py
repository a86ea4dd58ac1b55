"""Chooses how much of a model runs fused, and keeps its forward in step with the caller's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbexp.engine.buffers import LayerPages
from cbexp.engine.forward.llama import LlamaForward, read_llama, why_not_llama
from cbexp.engine.forward.plain import PlainForward
from cbexp.engine.forward.projections import ProjectionFusion
from cbexp.engine.types import EngineError, Fusion

ResolvedFusion = Literal["none", "projections", "layers"]


class ForwardChoice:
    """The forward of `model` over `pages` (by layer index), between `begin` and `end` of each drive.

    `max_positions` bounds the positions that decode steps reach. Parameters stay where the caller has put them.
    `EngineError`, from here and from `begin`: fused layers were asked for, and the model cannot run so.
    """

    def __init__(
        self, model: PreTrainedModel, pages: tuple[LayerPages, ...], fusion: Fusion, max_positions: int
    ) -> None:
        self._model = model
        self._pages = pages
        self._asked = fusion
        self._max_positions = max_positions
        self._projections = ProjectionFusion(model)
        self._state: tuple[Any, ...] | None = None
        self.fusion = resolve_fusion(model, fusion)
        self.forward: PlainForward | LlamaForward = PlainForward(model, pages)

    def begin(self) -> bool:
        """Prepare a drive; whether what was captured or compiled from `forward` is void.

        That is so at first, and when parameters were re-assigned, moved or wrapped (an adapter) since the last drive;
        weights that were written in place keep everything valid.
        """
        self._projections.remove()
        state = (*_code_states(self._model), *_addresses(self._model))
        is_void = state != self._state
        self._state = None  # should anything here fail, the next drive does all of it again
        if is_void:
            self.fusion = resolve_fusion(self._model, self._asked)
            self.forward = self._build_forward()
        if self.fusion == "projections":
            self._projections.install()
        self._state = state
        return is_void

    def end(self) -> None:
        """Give the modules back to the caller. Safe to call twice."""
        self._projections.remove()

    def close(self) -> None:
        """`end`, and let go of the cache's pages. Safe to call twice."""
        self.end()
        self._pages, self._state = (), None
        self.forward = PlainForward(self._model, ())

    def plain_logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of the same step by the model's own code, nothing of it fused."""
        self._projections.remove()
        try:
            return PlainForward(self._model, self._pages)(token_ids, positions)
        finally:
            if self.fusion == "projections":
                self._projections.install()

    def describe(self) -> dict[str, Any]:
        """What is fused, as plain JSON values; `fusion_reason` says why not whole layers."""
        facts: dict[str, Any] = {"fusion": self.fusion}
        if self.fusion == "projections":
            facts["fused_projections"] = self._projections.describe()
            if self._asked == "auto":
                facts["fusion_reason"] = why_not_llama(self._model)
        return facts

    def _build_forward(self) -> PlainForward | LlamaForward:
        if self.fusion != "layers":
            return PlainForward(self._model, self._pages)
        return LlamaForward(read_llama(self._model, self._max_positions), self._pages)


def resolve_fusion(model: PreTrainedModel, fusion: Fusion) -> ResolvedFusion:
    """What `fusion` means for `model`.

    `auto` fuses whole layers in half precision on CUDA where the model allows it, else projections there; nothing on
    other devices, and nothing in float32 or float64, where the order of a sum can change a token.
    """
    if fusion == "layers":
        reason = why_not_llama(model)
        if reason is not None:
            raise EngineError(f"fusion='layers' is impossible: {reason}. Use fusion='auto' or 'projections'.")
        return "layers"
    if fusion != "auto":
        return fusion
    if model.device.type != "cuda" or model.dtype in (torch.float32, torch.float64):
        return "none"
    return "layers" if why_not_llama(model) is None else "projections"


def _addresses(model: PreTrainedModel) -> Iterator[tuple[Any, ...]]:
    """Where every parameter and buffer lies, and as what: compiled and captured code has it baked in."""
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            yield name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _code_states(model: PreTrainedModel) -> Iterator[tuple[Any, ...]]:
    """What decides of the modules' forwards besides tensors: classes, hooks, other forwards, adapters, their factors.

    The compiler guards on no hook, and a captured graph on nothing.
    """
    for name, module in model.named_modules():
        yield name, type(module)
        hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
        if hooks or "forward" in vars(module):
            yield name, *((key, id(hook)) for key, hook in hooks), id(vars(module).get("forward"))
        # transformers' models have methods of these names.
        if isinstance(getattr(module, "disable_adapters", None), bool):
            scaling = getattr(module, "scaling", {})
            factors = tuple(sorted(scaling.items())) if isinstance(scaling, dict) else ()
            yield name, module.disable_adapters, *module.active_adapters, *module.merged_adapters, factors
