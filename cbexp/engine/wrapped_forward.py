"""What trainers put around a module's forward: what is inside of it, and in which dtype it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]

# Module and name of a wrapper's code -> the variable in which it has what it calls. By the code, since each of them
# bears the name of the function inside.
_WRAPPERS = {
    ("accelerate.utils.operations", "convert_outputs_to_fp32.<locals>.forward"): "model_forward",
    ("torch.amp.autocast_mode", "autocast_decorator.<locals>.decorate_autocast"): "func",
    # Computes a loss without logits where it is asked to; else it is the forward inside.
    ("trl.trainer.utils", "add_fused_lm_head.<locals>._fused_forward"): "original_forward",
}


# TRL's GRPO with `cast_lm_head_to_fp32`: the head's forward, which takes float32 weights for what they are.
_FLOAT32_FORWARD = "cast_forward_to_fp32"


def plain_forward(module: nn.Module) -> Function | None:
    """The module's forward without what torch.compile, autocast and TRL put around it; None if it is its class's."""
    forward: Function = module.__dict__["forward"]
    for inner, _ in _peel(forward):
        forward = inner
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return None if forward.__func__ is type(module).forward else forward
    return forward


def find_autocasts(module: nn.Module) -> list[torch.autocast]:
    """The autocasts around the module's forward, the outermost first."""
    forward = module.__dict__.get("forward")
    found = [] if forward is None else [autocast for _, autocast in _peel(forward)]
    return [autocast for autocast in found if autocast is not None]


def computes_in_float32(module: nn.Module) -> bool:
    """Whether TRL has replaced the module's forward by one that casts to float32, autocast or not."""
    package, name = _origin(module.__dict__.get("forward"))
    return package.startswith("trl.") and name.rpartition(".")[2] == _FLOAT32_FORWARD


def _peel(forward: Function) -> Iterator[tuple[Function, torch.autocast | None]]:
    """What is inside each wrapper, from the outermost one on, and the autocast that a wrapper turns on."""
    while (found := _open(forward)) is not None:
        yield found
        forward = found[0]


def _open(forward: Function) -> tuple[Function, torch.autocast | None] | None:
    function: Any = getattr(forward, "__func__", forward)
    variable = _WRAPPERS.get(_origin(function))
    if variable is None:
        # A decorator of the caller's around a compiled function has this attribute too, by functools.wraps.
        compiled: Any = getattr(forward, "_torchdynamo_orig_callable", None)
        is_compiled = compiled is not None and getattr(forward, "__wrapped__", None) is compiled
        return (compiled, None) if is_compiled else None
    held = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }
    inner = held[variable]
    inner = getattr(inner, "model_forward", inner)  # accelerate's has an object in between
    if isinstance(forward, MethodType) and not hasattr(inner, "__self__"):
        inner = MethodType(inner, forward.__self__)
    return inner, next((value for value in held.values() if isinstance(value, torch.autocast)), None)


def _origin(function: Any) -> tuple[str, str]:
    """Module and name of its code; of what has none, nothing."""
    code = getattr(function, "__code__", None)
    return ("", "") if code is None else (function.__globals__.get("__name__", ""), code.co_qualname)
