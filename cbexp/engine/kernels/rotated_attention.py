"""Paged decode attention that finishes the q/k/v projection itself: sums its parts, norms, rotates, fills the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.attention_tiles import MIN_GROUP_ROWS, AttentionTile
from cbexp.engine.kernels.dependent_launch import launch_options, release_successor, wait_for_predecessor
from cbexp.engine.kernels.projected_heads import load_sum, norm_halves, rotate_halves

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _norm_and_rotate(
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
    if HAS_NORM:
        first, second = norm_halves(first, second, weight, inside, eps, HEAD_DIM, dtype)
    return rotate_halves(first, second, cos, sin, dtype)


@triton.jit
def _load_pages(table, start, num_cached, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Table entries of BLOCK_N tokens from `start` on: one scalar if a page holds all of them, else one a token."""
    place = start
    if PAGE % BLOCK_N != 0:
        place += tl.arange(0, BLOCK_N)
    return tl.load(table + place // PAGE, mask=place < num_cached, other=0)


@triton.jit
def _token_offsets(page, start, PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys of BLOCK_N tokens from `start` on lie, in elements."""
    token = tl.arange(0, BLOCK_N)
    first = page.to(tl.int64) * PAGE * TOKEN_STRIDE
    if PAGE % BLOCK_N == 0:
        return first + start % PAGE * TOKEN_STRIDE + token * TOKEN_STRIDE
    return first + (start + token) % PAGE * TOKEN_STRIDE


@triton.jit
def _attend_cached(
    query,
    best,
    acc,
    head_pages,
    table,
    offset,
    num_cached,
    new_slot,
    scale_log2,
    PAGE: tl.constexpr,
    IS_RING: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Go on with a softmax that knows one token, of score `best` and value `acc`, over the cached ones.

    IS_RING: the new token may lie among them, in `new_slot`.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    dim = tl.arange(0, query.shape[1])
    total = tl.full([query.shape[0]], 1.0, tl.float32)
    page = _load_pages(table, 0, num_cached, PAGE, BLOCK_N)
    for start in tl.range(0, num_cached, BLOCK_N, num_stages=STAGES):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < num_cached
        if IS_RING:
            inside = inside & (place != new_slot)
        offsets = _token_offsets(page + offset, start, PAGE, TOKEN_STRIDE, BLOCK_N)
        # One tile ahead: loads of keys and values that wait for this one would be pipelined half as deep.
        page = _load_pages(table, start + BLOCK_N, num_cached, PAGE, BLOCK_N)
        key_pointers = head_pages + offsets[:, None] + dim[None, :]
        keys = tl.load(key_pointers, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=precision) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        values = tl.load(key_pointers + PAGE * TOKEN_STRIDE, mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=precision)
        total = total * shrink + tl.sum(weights, axis=1)
        best = new_best
    return acc / total[:, None]


@triton.jit(do_not_specialize=["num_rows"])
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
    # The key heads of a row side by side in time: together they read whole tokens.
    kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    dtype: tl.constexpr = out.dtype.element_ty
    lane, half, dim = tl.arange(0, GROUP_ROWS), tl.arange(0, HALF), tl.arange(0, HEAD_DIM)
    in_group, in_half, in_head = (lane < GROUP)[:, None], half < HALF, dim < HEAD_DIM
    head = kv_head * GROUP + lane

    wait_for_predecessor(DEPENDENT)
    stride = num_rows.to(tl.int64) * ALL_HEADS * HEAD_DIM
    row_parts = parts + row * ALL_HEADS * HEAD_DIM
    place_q = head[:, None] * HEAD_DIM + half[None, :]
    place_k = (NUM_HEADS + kv_head) * HEAD_DIM + half
    place_v = (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dim
    # Before it is known whether the row is active: loads behind that branch would wait for its own.
    q_first = load_sum(row_parts, place_q, in_group, stride, SPLITS, dtype)
    q_second = load_sum(row_parts, place_q + HALF, in_group, stride, SPLITS, dtype)
    k_first = load_sum(row_parts, place_k, in_half, stride, SPLITS, dtype)
    k_second = load_sum(row_parts, place_k + HALF, in_half, stride, SPLITS, dtype)
    value = load_sum(row_parts, place_v, in_head, stride, SPLITS, dtype)
    offset = tl.load(page_offset)
    position = tl.load(positions + row)
    place_out = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    if position < 0:
        release_successor(DEPENDENT)
        tl.store(out + place_out, tl.zeros([GROUP_ROWS, HEAD_DIM], dtype), mask=in_group)
        return

    angle = position.to(tl.int64) * HEAD_DIM + half
    cosines, sines = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    q_first, q_second = _norm_and_rotate(
        q_first,
        q_second,
        q_norm + half,
        in_half,
        cosines[None, :],
        sines[None, :],
        eps,
        HAS_NORM,
        HEAD_DIM,
        dtype,
    )
    k_first, k_second = _norm_and_rotate(
        k_first, k_second, k_norm + half, in_half, cosines, sines, eps, HAS_NORM, HEAD_DIM, dtype
    )

    table = block_table + row * table_width
    slot = position % WINDOW if WINDOW > 0 else position
    page = (tl.load(table + slot // PAGE) + offset).to(tl.int64)
    head_pages = pages + kv_head * HEAD_DIM
    target = head_pages + (page * PAGE + slot % PAGE) * TOKEN_STRIDE
    tl.store(target + half, k_first)
    tl.store(target + HALF + half, k_second)
    tl.store(target + PAGE * TOKEN_STRIDE + dim, value.to(dtype))

    # The new token opens the online softmax from registers: what was just written need not be read.
    scale_log2 = scale * LOG2_E
    new_score = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32)[None, :], axis=1)
    new_score += tl.sum(q_second.to(tl.float32) * k_second.to(tl.float32)[None, :], axis=1)
    query = tl.join(q_first, q_second).permute(0, 2, 1).reshape(GROUP_ROWS, HEAD_DIM)
    num_cached = tl.minimum(position, WINDOW) if WINDOW > 0 else position
    attended = _attend_cached(
        query,
        new_score * scale_log2,
        tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32) + value[None, :],
        head_pages,
        table,
        offset,
        num_cached,
        slot,
        scale_log2,
        PAGE,
        WINDOW > 0,
        TOKEN_STRIDE,
        BLOCK_N,
        STAGES,
        EXACT,
    )
    release_successor(DEPENDENT)
    tl.store(out + place_out, attended.to(dtype), mask=in_group)


def rotated_paged_attention(
    parts: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    pages: Tensor,
    block_table: Tensor,
    page_offset: Tensor,
    *,
    eps: float,
    scaling: float,
    window: int,
    num_heads: int,
    tile: AttentionTile,
) -> Tensor:
    """Return attention [rows, num_heads, head_dim] of the new tokens whose projection is the sum of `parts`.

    parts [splits, rows, (num_heads + 2 * num_kv_heads) * head_dim]; the rest as in `paged_decode_attention` and
    `norm_and_rotate`. One program for each row and key head: for batches that fill the device so.
    """
    splits, num_rows, _ = parts.shape
    _, page_size, num_kv_heads, head_dim = pages.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=pages.dtype, device=pages.device)
    q_norm, k_norm = norms if norms is not None else (parts, parts)
    _rotated_attention_kernel[(num_kv_heads, num_rows)](
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
        BLOCK_N=tile.num_tokens,
        STAGES=tile.num_stages,
        EXACT=pages.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(pages.device),
    )
    return out
