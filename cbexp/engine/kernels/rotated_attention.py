"""Paged decode attention that finishes its projections: sums their parts, norms, rotates, and fills the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.heads import load_halves, load_sum, norm_and_rotate_halves
from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor
from cbexp.engine.kernels.tiles import MIN_GROUP_ROWS, AttentionTile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _store_new(key_target, value_target, k_first, k_second, value, is_wanted, HEAD_DIM: tl.constexpr):
    """Put the new key and value into their slot."""
    half, dim = tl.arange(0, HEAD_DIM // 2), tl.arange(0, HEAD_DIM)
    in_half = (half < HEAD_DIM) & is_wanted
    tl.store(key_target + half, k_first, mask=in_half)
    tl.store(key_target + HEAD_DIM // 2 + half, k_second, mask=in_half)
    tl.store(value_target + dim, value.to(value_target.dtype.element_ty), mask=(dim < HEAD_DIM) & is_wanted)


@triton.jit
def _score(q_first, q_second, k_first, k_second):
    """Product of queries with the new key, all in halves."""
    first = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32)[None, :], axis=1)
    return first + tl.sum(q_second.to(tl.float32) * k_second.to(tl.float32)[None, :], axis=1)


@triton.jit
def _num_cached(position, WINDOW: tl.constexpr):
    """Slots of a row that hold a token before the new one."""
    return tl.minimum(position, WINDOW) if WINDOW > 0 else position


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
    total,
    acc,
    head_pages,
    table,
    offset,
    first,
    last,
    new_slot,
    scale_log2,
    PAGE: tl.constexpr,
    IS_RING: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Go on with a softmax (values `acc`, their weights' sum `total`, the highest score `best`) over a row's slots.

    From `first`, a multiple of BLOCK_N, to before `last`. IS_RING: the new token may lie among them, in `new_slot`.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    dim = tl.arange(0, query.shape[1])
    page = _load_pages(table, first, last, PAGE, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < last
        if IS_RING:
            inside = inside & (place != new_slot)
        offsets = _token_offsets(page + offset, start, PAGE, TOKEN_STRIDE, BLOCK_N)
        # One tile ahead: loads of keys and values that wait for this one would be pipelined half as deep.
        page = _load_pages(table, start + BLOCK_N, last, PAGE, BLOCK_N)
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
    return best, total, acc


@triton.jit
def _keep_chunk(best, total, acc, row_acc, row_sums, chunk, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store the softmax of one chunk among those of its row."""
    lane, dim = tl.arange(0, acc.shape[0]), tl.arange(0, HEAD_DIM)
    in_group = lane < GROUP
    pointers = row_acc + (chunk * GROUP + lane)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(pointers, acc, mask=in_group[:, None])
    sums = row_sums + chunk * 2 * GROUP + lane
    tl.store(sums, best, mask=in_group)
    tl.store(sums + GROUP, total, mask=in_group)


@triton.jit
def _is_last_to_arrive(arrivals, num_chunks):
    """Whether all other chunks of the row have been kept; leaves the count of arrivals at zero for the next kernel."""
    # All threads have stored before one of them tells: release, and acquire for the program that combines.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == num_chunks - 1
    tl.store(arrivals, 0, mask=is_last)
    return is_last


@triton.jit
def _combine_chunks(
    row_acc,
    row_sums,
    num_chunks,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The softmax over a row, in the order of its chunks, whichever of them came last."""
    lane, dim = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD_DIM)
    in_group = lane < GROUP
    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
    for chunk in range(num_chunks):
        # Past the first-level cache: other multiprocessors wrote them.
        sums = row_sums + chunk * 2 * GROUP + lane
        chunk_best = tl.load(sums, mask=in_group, other=0.0, cache_modifier=".cg")
        chunk_total = tl.load(sums + GROUP, mask=in_group, other=1.0, cache_modifier=".cg")
        pointers = row_acc + (chunk * GROUP + lane)[:, None] * HEAD_DIM + dim[None, :]
        chunk_acc = tl.load(pointers, mask=in_group[:, None], other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, chunk_best)
        shrink, grow = tl.exp2(best - new_best), tl.exp2(chunk_best - new_best)
        acc = acc * shrink[:, None] + chunk_acc * grow[:, None]
        total = total * shrink + chunk_total * grow
        best = new_best
    return acc / total[:, None]


@triton.jit(do_not_specialize=["num_rows", "chunk_size", "max_chunks"])
def _rotated_attention_kernel(
    query_parts,
    key_parts,
    value_parts,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    pages,
    block_table,
    page_offset,
    partial_acc,
    partial_sums,
    arrivals,
    out,
    num_rows,
    table_width,
    chunk_size,
    max_chunks,
    eps,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # The key heads of a row side by side in time: together they read whole tokens. First chunks, which are full, first.
    kv_head, row, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    dtype: tl.constexpr = out.dtype.element_ty
    lane, half, dim = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD_DIM // 2), tl.arange(0, HEAD_DIM)
    in_group, in_half = (lane < GROUP)[:, None], half < HEAD_DIM
    head = kv_head * GROUP + lane

    wait_for_predecessor(DEPENDENT)
    num_chunks = 1
    if IS_CHUNKED:
        num_chunks = tl.cdiv(_num_cached(tl.load(positions + row), WINDOW), chunk_size)
        num_chunks = tl.maximum(num_chunks, 1)
        if chunk >= num_chunks:
            return
    # Before it is known whether the row is active: loads behind that branch would wait for its own.
    queries = query_parts + (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    own = (row * NUM_KV_HEADS + kv_head) * HEAD_DIM
    q_stride = num_rows.to(tl.int64) * NUM_HEADS * HEAD_DIM
    kv_stride = num_rows.to(tl.int64) * NUM_KV_HEADS * HEAD_DIM
    q_place = lane[:, None] * HEAD_DIM + half[None, :]
    q_first, q_second = load_halves(queries, q_place, in_group, q_stride, HEAD_DIM, SPLITS, dtype)
    k_first, k_second = load_halves(key_parts + own, half, in_half, kv_stride, HEAD_DIM, SPLITS, dtype)
    value = load_sum(value_parts + own, dim, dim < HEAD_DIM, kv_stride, SPLITS, dtype)
    offset, position = tl.load(page_offset), tl.load(positions + row)
    place_out = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    if position < 0:
        release_successor(DEPENDENT)
        tl.store(out + place_out, tl.zeros([GROUP_ROWS, HEAD_DIM], dtype), mask=in_group)
        return

    angle = position.to(tl.int64) * HEAD_DIM + half
    cosines, sines = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    q_first, q_second = norm_and_rotate_halves(
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
    k_first, k_second = norm_and_rotate_halves(
        k_first, k_second, k_norm + half, in_half, cosines, sines, eps, HAS_NORM, HEAD_DIM, dtype
    )

    table, head_pages = block_table + row * table_width, pages + kv_head * HEAD_DIM
    slot = position % WINDOW if WINDOW > 0 else position
    # The last chunk has the new token. It opens the online softmax from registers: what was just written need not be
    # read.
    has_new = chunk == num_chunks - 1
    page = (tl.load(table + slot // PAGE) + offset).to(tl.int64)
    target = head_pages + (page * PAGE + slot % PAGE) * TOKEN_STRIDE
    _store_new(target, target + PAGE * TOKEN_STRIDE, k_first, k_second, value, has_new, HEAD_DIM)
    scale_log2 = scale * LOG2_E
    query = tl.join(q_first, q_second).permute(0, 2, 1).reshape(GROUP_ROWS, HEAD_DIM)
    best = tl.where(has_new, _score(q_first, q_second, k_first, k_second) * scale_log2, float("-inf"))
    total = tl.full([GROUP_ROWS], 1.0, tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32) + value[None, :]
    if IS_CHUNKED:
        total, acc = tl.where(has_new, total, 0.0), tl.where(has_new, acc, 0.0)
    num_cached = _num_cached(position, WINDOW)
    best, total, acc = _attend_cached(
        query,
        best,
        total,
        acc,
        head_pages,
        table,
        offset,
        chunk * chunk_size if IS_CHUNKED else 0,
        tl.minimum((chunk + 1) * chunk_size, num_cached) if IS_CHUNKED else num_cached,
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
    if num_chunks == 1:
        tl.store(out + place_out, (acc / total[:, None]).to(dtype), mask=in_group)
    if IS_CHUNKED:  # noqa: SIM102 - the one is known when it is compiled, the other on the device
        if num_chunks > 1:
            task = row * NUM_KV_HEADS + kv_head
            row_acc = partial_acc + task * max_chunks * GROUP * HEAD_DIM
            row_sums = partial_sums + task * max_chunks * 2 * GROUP
            _keep_chunk(best, total, acc, row_acc, row_sums, chunk, GROUP, HEAD_DIM)
            if _is_last_to_arrive(arrivals + task, num_chunks):
                attended = _combine_chunks(row_acc, row_sums, num_chunks, GROUP, GROUP_ROWS, HEAD_DIM)
                tl.store(out + place_out, attended.to(dtype), mask=in_group)


def rotated_paged_attention(
    query_parts: Tensor,
    key_parts: Tensor,
    value_parts: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    pages: Tensor,
    block_table: Tensor,
    page_offset: Tensor,
    arrivals: Tensor,
    *,
    eps: float,
    scaling: float,
    window: int,
    tile: AttentionTile,
    chunk: int,
) -> Tensor:
    """Return attention [rows, num_heads, head_dim] of the new tokens whose projections are sums of parts.

    Parts are [splits, rows, heads * head_dim], of queries, keys and values; the rest is as in `paged_decode_attention`
    and `norm_and_rotate`. One program for each row, key head and `chunk` (a multiple of the tile) of a row's slots; of
    several, the last to finish combines them. `arrivals`: int32 zeros [at least rows * num_kv_heads], and zeros again
    afterwards.
    """
    splits, num_rows, width = query_parts.shape
    _, page_size, num_kv_heads, head_dim = pages.shape
    num_heads = width // head_dim
    out = torch.empty((num_rows, num_heads, head_dim), dtype=pages.dtype, device=pages.device)
    max_chunks = -(-(window or block_table.shape[1] * page_size) // chunk)
    partial_acc = partial_sums = out
    if max_chunks > 1:
        shape = (num_rows, num_kv_heads, max_chunks, num_heads // num_kv_heads)
        partial_acc = torch.empty((*shape, head_dim), dtype=torch.float32, device=pages.device)
        partial_sums = torch.empty((*shape, 2), dtype=torch.float32, device=pages.device)
    _rotated_attention_kernel[(num_kv_heads, num_rows, max_chunks)](
        query_parts,
        key_parts,
        value_parts,
        positions,
        cos,
        sin,
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        pages,
        block_table,
        page_offset,
        partial_acc,
        partial_sums,
        arrivals,
        out,
        num_rows,
        block_table.shape[1],
        chunk,
        max_chunks,
        eps,
        scaling,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window,
        IS_CHUNKED=max_chunks > 1,
        SPLITS=splits,
        HAS_NORM=q_norm is not None,
        GROUP_ROWS=max(MIN_GROUP_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=tile.num_tokens,
        STAGES=tile.num_stages,
        EXACT=pages.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(pages.device),
    )
    return out
