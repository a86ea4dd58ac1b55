"""Products of a batch with weights that lie where the caller has put them, each at an address of its own.

The engine's kernels for few rows, where reading the weights takes the time; the vendor's library for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine.forward.reference import joint_linear
from cbexp.engine.kernels import tiles

# The distance in memory between two weights of one batched product is a multiple of so many bytes.
ALIGNMENT = 16


def project(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """`x @ weight.T + bias` for each weight as parts [splits, rows, out_features], on a CUDA device.

    The sum of the parts is the product. There are several, in float32, where the columns of x are split; else one.
    x [rows, in_features], weights and biases as in `reference.joint_linear`, all contiguous.
    """
    from cbexp.engine.kernels import linear

    num_rows, sizes = x.shape[0], [weight.shape[0] for weight in weights]
    limits = tiles.device_limits(x.device)
    if num_rows <= tiles.MAX_SKINNY_ROWS:
        tile = tiles.choose_split_tile(num_rows, sizes, x.shape[1], x.itemsize, limits)
        return linear.split_linear(x, weights, biases, tile)
    if len(weights) > 1:
        return [product[None] for product in _project_many_rows(x, weights, biases)]
    is_plain = x.itemsize == 2 and not biases
    if is_plain and tiles.splits_large_product(num_rows, weights[0].shape, limits):
        return [_in_halves(x, weights[0])]
    return [functional.linear(x, weights[0], *biases)[None]]


def project_whole(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """As `project`, but each product as one tensor [rows, out_features] in x's dtype; in float32 by the library."""
    num_rows, sizes = x.shape[0], [weight.shape[0] for weight in weights]
    if num_rows > tiles.MAX_SKINNY_ROWS or x.itemsize != 2:
        return joint_linear(x, weights, biases)
    from cbexp.engine.kernels import linear

    tile = tiles.choose_split_tile(num_rows, sizes, x.shape[1], x.itemsize, tiles.device_limits(x.device))
    parts = linear.split_linear(x, weights, biases, replace(tile, splits=1), out_dtype=x.dtype)
    return [part[0] for part in parts]


def project_gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` [rows, n] of two weights [n, in_features], on a CUDA device."""
    from cbexp.engine.kernels import linear

    if x.shape[0] <= tiles.MAX_SKINNY_ROWS:
        tile = tiles.choose_gated_tile(x.shape[0], x.itemsize, tiles.device_limits(x.device))
        return linear.gate_up_silu(x, gate, up, tile)
    return linear.silu_product(*_project_many_rows(x, [gate, up], []))


def _in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """The product in two float32 parts [2, rows, out_features], where one of all columns leaves half the device idle.

    The library splits such products too, but sums the parts in a kernel of its own, where the next one does it anyway.
    """
    halves = x.view(x.shape[0], 2, -1).transpose(0, 1)
    weight_halves = weight.view(weight.shape[0], 2, -1).permute(1, 2, 0)
    return torch.bmm(halves, weight_halves, out_dtype=torch.float32)


def _project_many_rows(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Each product [rows, out_features] by the vendor's library; the last two as one where their shapes allow it.

    Keys and values alone are too small a product to keep the device busy, and so is half of a gated projection.
    """
    *others, first, second = weights
    if biases or first.shape != second.shape or (first.data_ptr() - second.data_ptr()) % ALIGNMENT:
        return joint_linear(x, weights, biases)
    return [*joint_linear(x, others, []), *_multiply_pair(x, first, second)]


def _multiply_pair(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both products [rows, n] of x with two weights of one shape [n, in_features]."""
    if first.data_ptr() > second.data_ptr():
        of_second, of_first = _multiply_pair(x, second, first)
        return of_first, of_second
    pair = _as_one_tensor(first, second)
    of_first, of_second = torch.bmm(x.expand(2, *x.shape), pair.transpose(1, 2))
    return of_first, of_second


def _as_one_tensor(first: Tensor, second: Tensor) -> Tensor:
    """Two weights [n, in_features] as [2, n, in_features], from the lower address on to the higher one.

    The batch's stride is the distance between them. The memory stays the weights' own: this tensor keeps none of it.
    """
    distance = second.data_ptr() - first.data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(
        first.data_ptr(), first.device, distance + second.nbytes
    )
    strides = (distance // first.itemsize, *first.stride())
    return first.new_empty(0).set_(storage, 0, (2, *first.shape), strides)
