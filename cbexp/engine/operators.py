"""Operators of torch that this package adds, and what torch.compile's code generator is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._library.custom_ops import CustomOpDef

_names: list[str] = []


def operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., object]], CustomOpDef]:
    """As `torch.library.custom_op`, for `cbexp::name`: its inputs keep the strides that model code gives them."""
    qualified_name = f"cbexp::{name}"
    _names.append(qualified_name)
    return torch.library.custom_op(
        qualified_name, mutates_args=mutates_args, tags=(torch.Tag.needs_exact_strides,)
    )


def declare_operators() -> None:
    """Tell Inductor that the operators are called as they are.

    When torch 2.11 finds that out by itself, it first writes down what each input was computed from, and what that was
    computed from: text that doubles with every layer, and minutes over 36.
    """
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # late: it takes seconds

    FALLBACK_ALLOW_LIST.update(_names)
