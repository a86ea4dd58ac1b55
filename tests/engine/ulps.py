"""Half precision compared without a processor's, a BLAS's or a PyTorch build's own way of rounding it."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, computed in float64 and rounded once to the dtype of x.

    A library may sum in half precision, in any order.
    """
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


def unit_in_last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance (float64) between neighbouring numbers of `dtype` at `values`."""
    info = torch.finfo(dtype)
    magnitude = values.double().abs().clamp(min=info.smallest_normal)
    return info.eps * torch.exp2(torch.floor(torch.log2(magnitude)))


def assert_rounded_alike(actual: Tensor, expected: Tensor, *, roundings: int) -> None:
    """Compare what rounds `roundings` times from its inputs to its result with an oracle that does so exactly.

    Float32 sums of another order may put a value on the other side of a rounding, which moves the result by one unit
    in the last place. So `roundings` units are allowed. They are those of the largest element along the last axis,
    since the error of a sum depends on its terms, however small the sum is.
    Few values are that close to a rounding: at most 1 % may differ, or two where there are few. With a rounding too
    many or too few, a quarter does.
    """
    assert actual.dtype == expected.dtype
    allowed = roundings * unit_in_last_place(expected.abs().amax(-1, keepdim=True), actual.dtype)
    error = (actual.double() - expected.double()).abs()
    assert (error <= allowed).all(), (
        f"off by {(error / allowed).max() * roundings:.3g} units in the last place"
    )
    num_other = int(actual.ne(expected).sum())
    assert num_other <= max(2, 0.01 * expected.numel()), f"{num_other} of {expected.numel()} elements differ"
