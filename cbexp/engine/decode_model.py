"""Chooses how much of a model runs fused, and keeps its forward in step with the caller's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbexp.engine.buffers import LayerPages
from cbexp.engine.fused_forward import FusedForward
from cbexp.engine.fused_layers import read_fused_model, why_not_fused
from cbexp.engine.fused_projections import ProjectionFusion
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.types import EngineError, Fusion

ResolvedFusion = Literal["none", "projections", "layers"]


def resolve_fusion(model: PreTrainedModel, fusion: Fusion, *, allows_layers: bool) -> ResolvedFusion:
    """What `fusion` comes to for `model`; without `allows_layers`, `auto` leaves decoder layers whole.

    `auto` fuses whole layers in half precision on CUDA where the model allows it, else projections there; nothing on
    other devices, and nothing in float32 or float64, where the order of a sum can change a token.

    Raises:
        EngineError: whole layers were asked for, and the model cannot run so.
    """
    if fusion == "layers":
        reason = why_not_fused(model)
        if reason is not None:
            raise EngineError(f"fusion='layers' is impossible: {reason}. Use fusion='auto' or 'projections'.")
        return "layers"
    if fusion != "auto":
        return fusion
    if model.device.type != "cuda" or model.dtype in (torch.float32, torch.float64):
        return "none"
    return "layers" if allows_layers and why_not_fused(model) is None else "projections"


class DecodeModel:
    """The forward of `model` over `pages` (by layer index), between `begin` and `end` of each drive.

    `max_positions` bounds the positions that decode steps reach.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pages: tuple[LayerPages, ...],
        fusion: Fusion,
        max_positions: int,
        *,
        allows_layers: bool = True,
    ) -> None:
        self._allows_layers = allows_layers
        self.fusion = resolve_fusion(model, fusion, allows_layers=allows_layers)
        self._asked = fusion
        self._model = model
        self._pages = pages
        self._max_positions = max_positions
        self._projections = ProjectionFusion(model)
        self._addresses: tuple[Any, ...] | None = None
        self.forward: ModelForward | FusedForward = ModelForward(model, pages)

    def begin(self) -> bool:
        """Prepare a drive; whether `forward` is void for what was captured or compiled from it before.

        That is so at first, and when parameters were re-assigned, moved or wrapped (an adapter) since the last drive;
        weights that were written in place keep everything valid.
        """
        self.fusion = resolve_fusion(self._model, self._asked, allows_layers=self._allows_layers)
        self._projections.remove()  # whose forwards are not the caller's
        code = tuple(_code_states(self._model))
        if self.fusion == "projections":
            self._projections.install()
        elif self.fusion == "layers":
            self._projections.weights.refresh()
        addresses = (self.fusion, *code, *_addresses(self._model))
        if addresses == self._addresses:
            return False
        self._addresses = None  # should building fail, the next drive builds again
        self.forward = self._build_forward()
        self._addresses = addresses
        return True

    def plain_logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of the same step by the model's own code, nothing of it fused."""
        self._projections.remove()
        try:
            return ModelForward(self._model, self._pages).logits(token_ids, positions)
        finally:
            if self.fusion == "projections":
                self._projections.install()

    def end(self) -> None:
        """Give the modules back to the caller; weights stay where they are, as views of fused tensors."""
        self._projections.remove()

    def close(self) -> None:
        """Give every parameter its own storage back."""
        self._projections.close()

    def describe(self) -> dict[str, Any]:
        """What is fused, as plain JSON values; `fusion_reason` says why not whole layers."""
        facts: dict[str, Any] = {"fusion": self.fusion}
        if self.fusion != "none":
            facts["fused_projections"] = self._projections.describe()
        if self._asked == "auto" and self._allows_layers and self.fusion == "projections":
            facts["fusion_reason"] = why_not_fused(self._model)
        return facts

    def _build_forward(self) -> ModelForward | FusedForward:
        if self.fusion != "layers":
            return ModelForward(self._model, self._pages)
        fused = read_fused_model(self._model, self._projections.weights, self._max_positions)
        return FusedForward(fused, self._pages)


def _addresses(model: PreTrainedModel) -> Iterator[tuple[Any, ...]]:
    """Where every parameter and buffer lies, and as what: compiled and captured code has it baked in."""
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            yield name, tensor.data_ptr(), tensor.dtype, tensor.shape


def _code_states(model: PreTrainedModel) -> Iterator[tuple[Any, ...]]:
    """What decides of the modules' forwards besides tensors: hooks, replaced forwards, adapters and their factors.

    The compiler guards on no hook, and a captured graph on nothing.
    """
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
        if hooks or "forward" in vars(module):
            yield name, *((key, id(hook)) for key, hook in hooks), id(vars(module).get("forward"))
        # transformers' models have methods of these names.
        if isinstance(getattr(module, "disable_adapters", None), bool):
            scaling = getattr(module, "scaling", {})
            factors = tuple(sorted(scaling.items())) if isinstance(scaling, dict) else ()
            yield name, module.disable_adapters, *module.active_adapters, *module.merged_adapters, factors
