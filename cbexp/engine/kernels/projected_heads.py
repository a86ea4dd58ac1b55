"""Queries, keys and values of a projection: summed from its parts, normed head by head, rotated by their positions.

A head is held as two halves, which is how Llama's rotary embedding pairs its elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.dependent_launch import launch_options, release_successor, wait_for_predecessor


@triton.jit
def load_sum(parts, place, inside, stride, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Sum of the parts of a projection, each `stride` after the last; rounded as the projection itself would be."""
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * stride + place, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def norm_halves(first, second, weight, inside, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
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
def rotate_halves(first, second, cos, sin, dtype: tl.constexpr):
    """Rotary embedding in `dtype`; each product is rounded before they are added, as the model's own code does."""
    turned_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    turned_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    parts,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    out,
    num_rows,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    half_dim: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    in_half = half < half_dim
    inside = (head < all_heads)[:, None] & in_half[None, :]
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    place = (row * all_heads + head)[:, None] * HEAD_DIM + half[None, :]
    stride = num_rows.to(tl.int64) * all_heads * HEAD_DIM
    first = load_sum(parts, place, inside, stride, SPLITS, dtype)
    second = load_sum(parts, place + half_dim, inside, stride, SPLITS, dtype)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    if HAS_NORM:
        weight = tl.where(is_query, q_norm + half[None, :], k_norm + half[None, :])
        normed = norm_halves(first, second, weight, in_half[None, :], eps, HEAD_DIM, dtype)
        first = tl.where(is_value, first, normed[0])
        second = tl.where(is_value, second, normed[1])
    if HAS_ROTARY:
        angle = tl.maximum(tl.load(positions + row), 0).to(tl.int64) * HEAD_DIM + half
        cos_half = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
        sin_half = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
        turned = rotate_halves(first, second, cos_half, sin_half, dtype)
        first = tl.where(is_value, first, turned[0].to(tl.float32))
        second = tl.where(is_value, second, turned[1].to(tl.float32))
    tl.store(out + place, first.to(dtype), mask=inside)
    tl.store(out + place + half_dim, second.to(dtype), mask=inside)


def norm_and_rotate(
    parts: Tensor,
    positions: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    *,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    heads_per_program: int = 8,
) -> Tensor:
    """Return queries, keys and values [rows, num_heads + 2 * num_kv_heads, head_dim] of their projection.

    parts [splits, rows, (num_heads + 2 * num_kv_heads) * head_dim] sum to the projection; rotary holds cosines and
    sines [max_positions, head_dim] (None: none is applied); norms the weights [head_dim] of the query's and the key's
    RMS norm (None likewise). Positions below 0 turn by the angle of 0.
    """
    splits, num_rows, width = parts.shape
    all_heads = num_heads + 2 * num_kv_heads
    head_dim = width // all_heads
    out = torch.empty((num_rows, all_heads, head_dim), dtype=dtype, device=parts.device)
    cos, sin = rotary if rotary is not None else (parts, parts)
    q_norm, k_norm = norms if norms is not None else (parts, parts)
    _rotate_kernel[(num_rows, triton.cdiv(all_heads, heads_per_program))](
        parts,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        out,
        num_rows,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        HAS_NORM=norms is not None,
        HAS_ROTARY=rotary is not None,
        HEADS=heads_per_program,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
        **launch_options(parts.device),
    )
    return out
