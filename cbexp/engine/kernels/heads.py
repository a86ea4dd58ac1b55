"""Heads of a projection: summed up from its parts, normed head by head, rotated by their positions.

A head is held as two halves, which is how Llama's rotary embedding pairs its elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor

HEADS_PER_PROGRAM = 8


@triton.jit
def load_sum(parts, place, inside, stride, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Sum of the parts of a projection, each `stride` after the last; rounded as the projection itself would be."""
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * stride + place, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def load_halves(
    parts, place, inside, stride, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, dtype: tl.constexpr
):
    """`load_sum` of heads, whose first halves are at `place`, as their two halves."""
    first = load_sum(parts, place, inside, stride, SPLITS, dtype)
    second = load_sum(parts, place + HEAD_DIM // 2, inside, stride, SPLITS, dtype)
    return first, second


@triton.jit
def _norm_halves(first, second, weight, inside, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMS norm over the last axis; `weight` points at those of the first half, rounded as Llama's own code does."""
    variance = (tl.sum(first * first, axis=-1) + tl.sum(second * second, axis=-1)) / HEAD_DIM
    scale = tl.rsqrt(variance + eps)
    if len(first.shape) == 2:
        scale = scale[:, None]
    weight_first = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    weight_second = tl.load(weight + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def norm_and_rotate_halves(
    first,
    second,
    weight,
    inside,
    cos,
    sin,
    eps,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    dtype: tl.constexpr,
):
    """RMS norm with `weight` if there is one, then the rotary embedding, both in `dtype`.

    Each product of the rotation is rounded before they are added, as the model's own code does.
    """
    if HAS_NORM:
        first, second = _norm_halves(first, second, weight, inside, eps, HEAD_DIM, dtype)
    turned_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    turned_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_and_rotate_kernel(
    parts,
    positions,
    cos,
    sin,
    weight,
    out,
    num_rows,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half_dim: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    in_half = half < half_dim
    inside = (head < NUM_HEADS)[:, None] & in_half[None, :]
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    place = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + half[None, :]
    stride = num_rows.to(tl.int64) * NUM_HEADS * HEAD_DIM
    first, second = load_halves(parts, place, inside, stride, HEAD_DIM, SPLITS, dtype)
    angle = tl.maximum(tl.load(positions + row), 0).to(tl.int64) * HEAD_DIM + half
    cosines = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first, second = norm_and_rotate_halves(
        first,
        second,
        weight + half[None, :],
        in_half[None, :],
        cosines,
        sines,
        eps,
        HAS_NORM,
        HEAD_DIM,
        dtype,
    )
    tl.store(out + place, first, mask=inside)
    tl.store(out + place + half_dim, second, mask=inside)


def norm_and_rotate(
    parts: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None,
    *,
    eps: float,
) -> Tensor:
    """Return the heads [rows, num_heads, head_dim], in the dtype of `cos`, of the projection that `parts` add up to.

    parts [splits, rows, num_heads * head_dim]; `cos` and `sin` [max_positions, head_dim]; `norm_weight` [head_dim] of
    the heads' RMS norm, if they have one. Positions below 0 turn by the angle of 0.
    """
    splits, num_rows, width = parts.shape
    head_dim = cos.shape[1]
    num_heads = width // head_dim
    out = torch.empty((num_rows, num_heads, head_dim), dtype=cos.dtype, device=parts.device)
    _norm_and_rotate_kernel[(num_rows, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        parts,
        positions,
        cos,
        sin,
        cos if norm_weight is None else norm_weight,
        out,
        num_rows,
        eps,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        HAS_NORM=norm_weight is not None,
        HEADS=HEADS_PER_PROGRAM,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
        **launch_options(parts.device),
    )
    return out
