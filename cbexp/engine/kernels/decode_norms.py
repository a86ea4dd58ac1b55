"""What stands between the matrix products of a decode step: residuals, RMS norms, rotary embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbexp.engine.kernels.dependent_launch import launch_options, release_successor, wait_for_predecessor


@triton.jit
def _normalise(hidden, weight, columns, inside, N: tl.constexpr, eps, dtype: tl.constexpr):
    """Llama's RMS norm: float32 inside, rounded to the model's dtype before the weight multiplies it."""
    variance = tl.sum(hidden * hidden, axis=0) / N
    scaled = (hidden * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    return (scaled * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)).to(dtype)


@triton.jit
def _embed_norm_kernel(
    token_ids,
    table,
    weight,
    residual,
    out,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    token = tl.load(token_ids + row).to(tl.int64)
    hidden = tl.load(table + token * N + columns, mask=inside, other=0.0)
    place = row.to(tl.int64) * N + columns
    tl.store(residual + place, hidden, mask=inside)
    normed = _normalise(hidden.to(tl.float32), weight, columns, inside, N, eps, out.dtype.element_ty)
    tl.store(out + place, normed, mask=inside)


@triton.jit
def _add_norm_kernel(
    parts,
    residual,
    weight,
    summed,
    out,
    num_rows,
    eps,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    place = row * N + columns
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    hidden = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        added += tl.load(parts + split * num_rows.to(tl.int64) * N + place, mask=inside, other=0.0).to(
            tl.float32
        )
    hidden = (hidden + added.to(dtype).to(tl.float32)).to(dtype)
    tl.store(summed + place, hidden, mask=inside)
    normed = _normalise(hidden.to(tl.float32), weight, columns, inside, N, eps, dtype)
    tl.store(out + place, normed, mask=inside)


@triton.jit
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
    inside = (head < all_heads)[:, None] & (half < half_dim)[None, :]
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    place = (row * all_heads + head)[:, None] * HEAD_DIM + half[None, :]
    first = tl.zeros([HEADS, HALF], tl.float32)
    second = tl.zeros([HEADS, HALF], tl.float32)
    for split in tl.static_range(SPLITS):
        shift = split * num_rows.to(tl.int64) * all_heads * HEAD_DIM
        first += tl.load(parts + shift + place, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(parts + shift + place + half_dim, mask=inside, other=0.0).to(tl.float32)
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    if HAS_NORM:
        variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(variance + eps)[:, None]
        in_half = (half < half_dim)[None, :]
        norm_weight = tl.where(is_query, q_norm + half[None, :], k_norm + half[None, :])
        first_weight = tl.load(norm_weight, mask=in_half, other=0.0).to(tl.float32)
        second_weight = tl.load(norm_weight + half_dim, mask=in_half, other=0.0).to(tl.float32)
        first_normed = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second_normed = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
        first = tl.where(is_value, first, first_normed)
        second = tl.where(is_value, second, second_normed)
    if HAS_ROTARY:
        position = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
        angle = position * HEAD_DIM + half
        cos_half = tl.load(cos + angle, mask=half < half_dim, other=0.0).to(tl.float32)[None, :]
        sin_half = tl.load(sin + angle, mask=half < half_dim, other=0.0).to(tl.float32)[None, :]
        # Each product is rounded before they are added, as the model's own code does.
        turned_first = (first * cos_half).to(dtype).to(tl.float32) - (second * sin_half).to(dtype).to(
            tl.float32
        )
        turned_second = (second * cos_half).to(dtype).to(tl.float32) + (first * sin_half).to(dtype).to(
            tl.float32
        )
        first = tl.where(is_value, first, turned_first)
        second = tl.where(is_value, second, turned_second)
    tl.store(out + place, first.to(dtype), mask=inside)
    tl.store(out + place + half_dim, second.to(dtype), mask=inside)


@triton.jit
def _silu_product_kernel(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * N + column, (activated * up).to(dtype), mask=inside)


def _num_warps(block: int) -> int:
    return min(8, max(1, block // 512))


def embed_norm(
    token_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings of `token_ids` [rows] and their RMS norm, both [rows, hidden]."""
    num_rows, num_columns = token_ids.shape[0], table.shape[1]
    residual = torch.empty((num_rows, num_columns), dtype=table.dtype, device=table.device)
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(num_columns)
    _embed_norm_kernel[(num_rows,)](
        token_ids,
        table,
        weight,
        residual,
        out,
        eps,
        N=num_columns,
        BLOCK=block,
        num_warps=_num_warps(block),
        **launch_options(table.device),
    )
    return residual, out


def add_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of `parts` [splits, rows, hidden] and `residual` [rows, hidden], and the RMS norm of that."""
    splits, num_rows, num_columns = parts.shape
    summed, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(num_columns)
    _add_norm_kernel[(num_rows,)](
        parts,
        residual,
        weight,
        summed,
        out,
        num_rows,
        eps,
        N=num_columns,
        SPLITS=splits,
        BLOCK=block,
        num_warps=_num_warps(block),
        **launch_options(residual.device),
    )
    return summed, out


def norm_and_rotate(
    parts: torch.Tensor,
    positions: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    heads_per_program: int = 8,
) -> torch.Tensor:
    """Return queries, keys and values [rows, num_heads + 2 * num_kv_heads, head_dim] of their projection.

    parts [splits, rows, (num_heads + 2 * num_kv_heads) * head_dim] sum to the projection; rotary holds cosines and sines
    [max_positions, head_dim] (None: none is applied); norms the weights of the query's and the key's RMS norm [head_dim].
    Positions below 0 turn by 0.
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


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [rows, n] of `gate_up` [rows, 2n]."""
    num_rows, width = gate_up.shape
    num_columns = width // 2
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(num_columns))
    _silu_product_kernel[(num_rows, triton.cdiv(num_columns, block))](
        gate_up, out, N=num_columns, BLOCK=block, num_warps=4, **launch_options(gate_up.device)
    )
    return out
