"""Paged decode attention that finishes the q/k/v projection itself: sums its parts, norms, rotates, writes the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbexp.engine.kernels.dependent_launch import launch_options, release_successor, wait_for_predecessor

# Query heads of one key head are padded to the rows of a tensor core's tile.
MIN_GROUP_ROWS = 16
LOG2_E = 1.4426950408889634


@triton.jit
def _load_sum(parts, place, inside, stride, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Sum of the projection's parts, rounded as the projection itself would be."""
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * stride + place, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _norm_halves(first, second, weight, half, inside, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMS norm over the last axis of a vector held as two halves."""
    variance = (tl.sum(first * first, axis=-1) + tl.sum(second * second, axis=-1)) / HEAD_DIM
    scale = tl.rsqrt(variance + eps)
    if len(first.shape) == 2:
        scale = scale[:, None]
    weight_first = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
    weight_second = tl.load(weight + HEAD_DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
    first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate_halves(first, second, cos, sin, dtype: tl.constexpr):
    """Rotary embedding of a vector held as two halves; each product is rounded before they are added."""
    turned_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    turned_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit
def _rotated_attention_kernel(
    parts,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    pages,
    block_table,
    page_offset,
    out,
    num_rows,
    table_width,
    eps,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    half_dim: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    lane = tl.arange(0, GROUP_ROWS)
    half = tl.arange(0, half_dim)
    dim = tl.arange(0, HEAD_DIM)
    in_half = half < half_dim
    in_group = lane < group
    head = kv_head * group + lane
    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    page_stride: tl.constexpr = PAGE * token_stride

    wait_for_predecessor(DEPENDENT)
    position = tl.load(positions + row)
    place_out = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    if position < 0:
        release_successor(DEPENDENT)
        tl.store(out + place_out, tl.zeros([GROUP_ROWS, HEAD_DIM], dtype), mask=in_group[:, None])
        return
    stride = num_rows.to(tl.int64) * all_heads * HEAD_DIM
    first_row = row * all_heads * HEAD_DIM
    place_q = first_row + head[:, None] * HEAD_DIM + half[None, :]
    place_k = first_row + (NUM_HEADS + kv_head) * HEAD_DIM + half
    place_v = first_row + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dim
    in_query = in_group[:, None] & in_half[None, :]
    q_first = _load_sum(parts, place_q, in_query, stride, SPLITS, dtype)
    q_second = _load_sum(parts, place_q + half_dim, in_query, stride, SPLITS, dtype)
    k_first = _load_sum(parts, place_k, in_half, stride, SPLITS, dtype)
    k_second = _load_sum(parts, place_k + half_dim, in_half, stride, SPLITS, dtype)
    value = _load_sum(parts, place_v, dim < HEAD_DIM, stride, SPLITS, dtype)
    if HAS_NORM:
        q_first, q_second = _norm_halves(q_first, q_second, q_norm, half, in_half, eps, HEAD_DIM, dtype)
        k_first, k_second = _norm_halves(k_first, k_second, k_norm, half, in_half, eps, HEAD_DIM, dtype)
    angle = position.to(tl.int64) * HEAD_DIM + half
    cos_half, sin_half = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    q_first, q_second = _rotate_halves(q_first, q_second, cos_half[None, :], sin_half[None, :], dtype)
    k_first, k_second = _rotate_halves(k_first, k_second, cos_half, sin_half, dtype)

    offset = tl.load(page_offset)
    table = block_table + row * table_width
    slot = position % WINDOW if WINDOW > 0 else position
    page = (tl.load(table + slot // PAGE) + offset).to(tl.int64)
    target = page * page_stride + (slot % PAGE) * token_stride + kv_head * HEAD_DIM
    tl.store(pages + target + half, k_first)
    tl.store(pages + target + half_dim + half, k_second)
    tl.store(pages + target + page_stride + dim, value.to(dtype))

    # The new token opens the online softmax from registers: what was just written need not be read.
    scale_log2 = scale * 1.4426950408889634
    new_score = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32)[None, :], axis=1)
    new_score += tl.sum(q_second.to(tl.float32) * k_second.to(tl.float32)[None, :], axis=1)
    best = new_score * scale_log2
    total = tl.full([GROUP_ROWS], 1.0, tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32) + value[None, :]
    query = tl.join(q_first, q_second).permute(0, 2, 1).reshape(GROUP_ROWS, HEAD_DIM)
    num_cached = tl.minimum(position, WINDOW) if WINDOW > 0 else position
    token = tl.arange(0, BLOCK_N)
    for start in tl.range(0, num_cached, BLOCK_N, num_stages=STAGES):
        place = start + token
        inside = place < num_cached
        if WINDOW > 0:
            inside = inside & (place != slot)
        if PAGE % BLOCK_N == 0:
            page = (tl.load(table + start // PAGE) + offset).to(tl.int64)
            base = page * page_stride + (start % PAGE) * token_stride + kv_head * HEAD_DIM + token * token_stride
        else:
            page = (tl.load(table + place // PAGE, mask=inside, other=0) + offset).to(tl.int64)
            base = page * page_stride + (place % PAGE) * token_stride + kv_head * HEAD_DIM
        keys = tl.load(pages + base[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=precision) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        values = tl.load(pages + base[:, None] + page_stride + dim[None, :], mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(dtype), values, input_precision=precision)
        total = total * shrink + tl.sum(weights, axis=1)
        best = new_best
    release_successor(DEPENDENT)
    tl.store(out + place_out, (acc / total[:, None]).to(dtype), mask=in_group[:, None])


def rotated_paged_attention(
    parts: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    page_offset: torch.Tensor,
    *,
    eps: float,
    scaling: float,
    window: int,
    num_heads: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
) -> torch.Tensor:
    """Return attention [rows, num_heads, head_dim] of the new tokens whose projection is the sum of `parts`.

    parts [splits, rows, (num_heads + 2 * num_kv_heads) * head_dim]; the rest as in `paged_decode_attention` and
    `norm_and_rotate`. One program for each row and key head: for batches that fill the device so.
    """
    splits, num_rows, _ = parts.shape
    _, page_size, num_kv_heads, head_dim = pages.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=pages.dtype, device=pages.device)
    q_norm, k_norm = norms if norms is not None else (parts, parts)
    _rotated_attention_kernel[(num_rows, num_kv_heads)](
        parts,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        pages,
        block_table,
        page_offset,
        out,
        num_rows,
        block_table.shape[1],
        eps,
        scaling,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window,
        SPLITS=splits,
        HAS_NORM=norms is not None,
        GROUP_ROWS=max(MIN_GROUP_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=block_n,
        STAGES=num_stages,
        EXACT=pages.dtype == torch.float32,
        num_warps=num_warps,
        **launch_options(pages.device),
    )
    return out
