"""Operators of torch that this package adds, and how torch.compile's code generator treats them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._library.custom_ops import CustomOpDef

_names: list[str] = []


def operator(
    reference: Callable[..., object],
    mutates_args: Iterable[str] = (),
    shapes: Callable[..., object] | None = None,
) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Make an operator `cbexp::name` of the decorated function, which computes on CUDA what `reference` defines.

    `reference`, in plain torch, has the same parameters. It gives the operator's schema and shapes, and serves every
    other device; `shapes` gives them in its place where it looks at values. Inputs keep the strides that model code
    gives them.
    """

    def register(on_cuda: Callable[..., object]) -> CustomOpDef:
        name = f"cbexp::{on_cuda.__name__}"
        defined = torch.library.custom_op(
            name, reference, mutates_args=mutates_args, tags=(torch.Tag.needs_exact_strides,)
        )
        defined.register_kernel("cuda")(on_cuda)
        defined.register_fake(shapes or reference)
        _names.append(name)
        return defined

    return register


def declare_operators() -> None:
    """Tell Inductor that the operators are called as they are.

    When torch 2.11 finds that out by itself, it first writes down what each input was computed from, and what that was
    computed from: text that doubles with every layer, and minutes over 36.
    """
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST  # late: it takes seconds

    FALLBACK_ALLOW_LIST.update(_names)
