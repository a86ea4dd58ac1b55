"""Copies of float32 master weights in the dtype of their trainer's autocast, at addresses that stay."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.memory import ReleasableMemory, allocate
from cbexp.engine.support import read_engine_autocast
from cbexp.engine.types import CacheMemoryError
from cbexp.engine.wrapped_forward import computes_in_float32, find_autocasts

SHADOWED_DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 256


class Shadow:
    """Copies of a model's float32 parameters in the dtype of its autocast, which a drive runs on in their place.

    `wrappers`: the model as the trainer has it, from the outermost wrapper to the model itself; any of them may bear
    the autocast. There are no copies while there is no autocast, nor when the model's own dtype is another one (a base
    in half precision with adapters in float32). Not copied are parameters that transformers would keep in float32, and
    those of a head that TRL has cast to it.
    """

    def __init__(self, model: PreTrainedModel, wrappers: Sequence[nn.Module]) -> None:
        self._model = model
        self._wrappers = tuple(wrappers)
        self._copies: list[nn.Parameter] = []
        self._layout: tuple[Any, ...] = ()
        self._memory: ReleasableMemory | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the copies; None: there are none now."""
        return self._copies[0].dtype if self._copies else None

    def describe(self) -> dict[str, Any]:
        """As plain JSON values: the dtype that runs, and the memory that the copies take; there must be some."""
        assert self._memory is not None
        dtype = str(self._copies[0].dtype).removeprefix("torch.")
        return {"dtype": dtype, "shadow_bytes": self._memory.num_bytes}

    def find_dtype(self) -> torch.dtype | None:
        """The dtype in which the trainer would compute now, where that asks for copies; else None."""
        if self._model.dtype != torch.float32:
            return None
        dtype = find_autocast_dtype(self._model.device.type, self._wrappers)
        return dtype if dtype in SHADOWED_DTYPES else None

    def refresh(
        self, modules: Sequence[nn.Module], dtype: torch.dtype | None
    ) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        """Copy the weights of `modules` as they are now: a module's `_parameters`, a name in it, and its copy.

        Copies lie where they lay, unless parameters have other shapes or ties, or another device. Put on the current
        stream, without gradients. Without `dtype` there are none, and those from before are freed. Raises
        `CacheMemoryError` where the device has no memory for them.
        """
        if dtype is None:
            self.release()
            return []
        kept = _kept_in_float32(self._model, dtype)
        places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
        for module in modules:
            if computes_in_float32(module):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dtype == torch.float32 and parameter not in kept:
                    places.setdefault(parameter, []).append((module._parameters, name))
        shapes = [master.shape for master in places]
        layout = dtype, self._model.device, shapes
        if layout != self._layout:
            self.release()
            self._memory, self._copies = _allocate_copies(shapes, dtype, self._model.device)
            self._layout = layout
        self.take_back()
        if places:
            # Always: writes through `.data` leave no trace.
            torch._foreach_copy_(list[Tensor](self._copies), list[Tensor](places))
        return [
            (*place, copied)
            for copied, of_master in zip(self._copies, places.values(), strict=True)
            for place in of_master
        ]

    def give_up(self) -> None:
        """Let others have the memory until the next `refresh`; outside of a drive. Safe to call twice."""
        if self._memory is not None:
            self._memory.give_up()

    def take_back(self) -> None:
        """Have the memory again, where it was, ahead of the next `refresh`. Safe to call twice.

        Raises `CacheMemoryError` when the device has no room.
        """
        if self._memory is not None:
            self._memory.take_back()

    def release(self) -> None:
        """Free the memory; the next `refresh` takes some anew. Safe to call twice."""
        self._copies, self._layout, self._memory = [], (), None


def find_autocast_dtype(device_type: str, wrappers: Sequence[nn.Module]) -> torch.dtype | None:
    """The dtype of the autocast in which a model would run now, called by its outermost wrapper; None: there is none.

    The innermost autocast counts, and that of a forward is inside the caller's.
    """
    if not torch.amp.is_autocast_available(device_type):
        return None
    is_on = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_on else None
    for module in wrappers:
        dtype = read_engine_autocast(module) or dtype
        for autocast in find_autocasts(module):
            if autocast.device == device_type:
                dtype = autocast.fast_dtype if autocast._enabled else None
    return dtype


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[nn.Parameter]:
    """What transformers loads in float32 with `dtype` too: model code relies on it."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return set()
    names = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in plan))
    return {parameter for name, parameter in model.named_parameters() if names.search(name)}


def _allocate_copies(
    shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device
) -> tuple[ReleasableMemory | None, list[nn.Parameter]]:
    """Contiguous parameters in one piece of memory, without values; None where there is nothing to copy."""
    if not shapes:
        return None, []
    sizes = [shape.numel() * dtype.itemsize for shape in shapes]
    steps = [math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
    try:
        memory = allocate(sum(steps), device)
    except CacheMemoryError as error:
        raise CacheMemoryError(
            f"Under autocast a drive runs on a copy of the float32 weights in {str(dtype).removeprefix('torch.')}, and "
            f"{device} has no {sum(steps) / 2**30:.2f} GiB for it: load the model in half precision, or free memory "
            f"({str(error).partition('.')[0]})."
        ) from error
    parts = memory.as_tensor().split(steps)
    return memory, [
        nn.Parameter(part[:size].view(dtype).view(shape), requires_grad=False)
        for part, size, shape in zip(parts, sizes, shapes, strict=True)
    ]
