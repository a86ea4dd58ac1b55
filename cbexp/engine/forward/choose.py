"""Chooses how much of a model runs fused, and keeps its forward in step with the caller's weights."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.borrow import Changes, list_modules
from cbexp.engine.buffers import LayerPages
from cbexp.engine.forward.llama import LlamaForward, find_hook, why_not_llama
from cbexp.engine.forward.plain import PlainForward
from cbexp.engine.forward.projections import ProjectionFusion
from cbexp.engine.types import EngineError, Fusion

ResolvedFusion = Literal["none", "projections", "layers"]
# Attributes of transformers' modules: of attention, of norms.
BAKED_NUMBERS = ("scaling", "variance_epsilon", "eps")


class ForwardChoice:
    """The forward of `model` over `pages` (by layer index), between `begin` and `end` of each drive.

    `max_positions` bounds the positions that decode steps reach. Parameters stay where the caller has put them, and
    outside of a drive none of them is held here. The model is borrowed, here and in `begin`.
    `EngineError`, from here and from `begin`: fused layers were asked for, and the model cannot run so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pages: tuple[LayerPages, ...],
        fusion: Fusion,
        max_positions: int,
        *,
        fp32_head: bool = False,
    ) -> None:
        self._fp32_head = fp32_head
        self._head_changes = Changes()
        self._model = model
        self._pages = pages
        self._asked = fusion
        self._max_positions = max_positions
        self._projections = ProjectionFusion(model)
        self._state: list[Any] | None = None
        self._reason: str | None = None
        self.fusion: ResolvedFusion
        self._resolve()
        self.forward: PlainForward | LlamaForward = PlainForward(model, pages)

    def begin(self, *, is_new: bool = True) -> bool:
        """Prepare a drive, or the rest of one; whether what was captured or compiled from `forward` is void.

        That is so at first, and when parameters were re-assigned, moved or wrapped (an adapter) since the last time;
        weights that were written in place keep everything valid.
        """
        self.end()
        state = _read_state(self._model)
        is_void = state != self._state
        self._state = None  # should anything here fail, the next drive does all of it again
        if is_void:
            self._resolve()
            if self.fusion == "projections":
                self._projections.resolve()
            self.forward = self._build_forward()
        if self.fusion == "projections":
            self._projections.install()
        if self._fp32_head and self.fusion != "layers":  # where steps compute the logits themselves
            _install_fp32_head(self._model, self._head_changes)
        if is_new:
            self.forward.begin()
        self._state = state
        return is_void

    def read(self) -> None:
        """Have the weights at hand; for the rest of a drive `begin` leaves that to whoever runs `forward`."""
        self.forward.read()

    def end(self) -> None:
        """Give the modules back to the caller, and let go of the weights. Safe to call twice."""
        self._projections.remove()
        self._head_changes.undo()
        self.forward.end()

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
            if self._reason is not None:
                facts["fusion_reason"] = self._reason
        return facts

    def _resolve(self) -> None:
        """Find out what is fused, and why `auto` does not fuse whole layers; a warning when a hook alone forbids it."""
        self.fusion = resolve_fusion(self._model, self._asked)
        if self._asked != "auto" or self.fusion != "projections":
            self._reason = None
            return
        before, self._reason = self._reason, why_not_llama(self._model)
        if self._reason != before:
            warn_of_hook(self._model)

    def _build_forward(self) -> PlainForward | LlamaForward:
        if self.fusion != "layers":
            return PlainForward(self._model, self._pages)
        return LlamaForward(self._model, self._pages, self._max_positions)


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


def _install_fp32_head(model: PreTrainedModel, changes: Changes) -> None:
    """Have the language-model head sum up and give its logits in float32. Raises `EngineError` where it is no layer."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise EngineError(
            f"fp32_head=True needs a head that is a plain torch.nn.Linear, and this one is a {type(head).__name__}: "
            "leave it out."
        )

    def forward(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    changes.set(head.__dict__, "forward", forward)


def warn_of_hook(model: PreTrainedModel) -> None:
    """Warn when a hook or a replaced forward is all that keeps whole layers from being fused."""
    hook = find_hook(model)
    if hook is not None and why_not_llama(model) == hook:
        warnings.warn(
            f"fusion=auto fuses projections alone, which is slower: {hook}. Remove it for the drive to have whole "
            "layers fused.",
            stacklevel=2,
        )


def _read_state(model: PreTrainedModel) -> list[Any]:
    """What compiled and captured code has baked in, and no guard of the compiler's sees.

    It is what a module's forward depends on besides the values of tensors, and each tensor's address, dtype and layout.
    None of it is kept alive.
    """
    modules = list_modules(model)
    state = _code_state(modules)
    held: list[Tensor | None] = []
    for module in modules:
        if module._parameters:
            held += module._parameters.values()
        if module._buffers:
            held += module._buffers.values()
    tensors = [tensor for tensor in held if tensor is not None]
    for read in (Tensor.data_ptr, attrgetter("dtype", "shape"), Tensor.stride):
        state += map(read, tensors)
    return state


def _code_state(modules: Sequence[nn.Module]) -> list[Any]:
    """Classes, hooks, other forwards, numbers, adapters' switches."""
    state: list[Any] = []
    of_kind: dict[type, tuple[list[str], bool]] = {}
    for module in modules:
        kind, attributes = type(module), module.__dict__
        state += kind, weakref.ref(module)
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                state.append([(key, _reference(hook)) for key, hook in hooks.items()])
        if "forward" in attributes:
            state.append(_reference(attributes["forward"]))
        if kind not in of_kind:
            numbers = [name for name in BAKED_NUMBERS if isinstance(attributes.get(name), float)]
            # A property of PEFT's layers; transformers' models have a method of this name.
            of_kind[kind] = numbers, isinstance(getattr(kind, "disable_adapters", None), property)
        numbers, adds_adapters = of_kind[kind]
        if numbers:
            state += [attributes.get(name) for name in numbers]
        if adds_adapters:
            state.append(_adapter_state(module))
    return state


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    scaling = getattr(layer, "scaling", None)
    factors = sorted(scaling.items()) if isinstance(scaling, dict) else []
    return layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters), factors


def _reference(function: Any) -> Any:
    """A weak reference, or the function where there can be none; equal for the same function alone."""
    try:
        return weakref.ref(function)
    except TypeError:
        return function
