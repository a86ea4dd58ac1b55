"""Paged decode attention on a GPU: one program for the query heads that share a key-value head, or for a split of it.

Online softmax in base 2 (Milakov and Gimelshein, arXiv:1805.02867), parts of a sequence combined as in flash-decoding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor
from cbexp.engine.kernels.tiles import (
    MIN_BLOCK_DIM,
    MIN_GROUP_ROWS,
    AttentionTile,
    choose_attention_tile,
    choose_num_splits,
    device_limits,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Below every finite logit, so that subtracting it never gives NaN as minus infinity would.
LOWEST_LOGIT = tl.constexpr(-3.4028234663852886e38)


def paged_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    block_table: Tensor,
    positions: Tensor,
    page_offset: Tensor,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    num_splits: int | None = None,
    tile: AttentionTile | None = None,
) -> Tensor:
    """Do what `attention.reference.paged_decode_reference` describes, on a CUDA device.

    Shapes alone decide on the launch, so that a captured graph holds for other positions and block tables too.

    `num_splits` programs share a row's tokens for each key-value head, `tile` has the tokens, warps and stages of their
    main loop; the device chooses where they are None.

    Raises:
        ValueError: The last axis of a tensor is not contiguous.
    """
    _check_strides(
        query=query,
        key=key,
        value=value,
        pages=pages,
        block_table=block_table,
        positions=positions,
        sinks=sinks,
    )
    rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = pages.shape[1:3]
    group = num_heads // num_kv_heads
    group_rows = max(MIN_GROUP_ROWS, triton.next_power_of_2(group))
    block_dim = max(MIN_BLOCK_DIM, triton.next_power_of_2(head_dim))
    if tile is None:
        tile = choose_attention_tile(group_rows, block_dim, query.itemsize, device_limits(query.device))
    if num_splits is None:
        num_slots = window or block_table.shape[1] * page_size
        num_splits = choose_num_splits(rows * num_kv_heads, num_slots, device_limits(query.device))

    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial = log_sums = None
    if num_splits > 1:
        partial = output.new_empty((rows, num_heads, num_splits, head_dim), dtype=torch.float32)
        log_sums = output.new_empty((rows, num_heads, num_splits), dtype=torch.float32)
    _attend_kernel[(rows, num_kv_heads, num_splits)](
        query,
        key,
        value,
        pages,
        block_table,
        positions,
        page_offset,
        sinks,
        output if partial is None else partial,
        log_sums,
        scaling,
        num_splits,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *pages.stride()[:3],
        block_table.stride(0),
        GROUP=group,
        GROUP_ROWS=group_rows,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        PAGE_SIZE=page_size,
        BLOCK_TOKENS=tile.num_tokens,
        WINDOW=window,
        SOFTCAP=softcap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(query.device),
    )
    if partial is not None and log_sums is not None:
        _combine(partial, log_sums, output)
    return output


def _combine(partial: Tensor, log_sums: Tensor, output: Tensor) -> None:
    """Write to `output` [rows, num_heads, head_dim] what the splits of each head add up to."""
    rows, num_heads, num_splits, head_dim = partial.shape
    _combine_kernel[(rows, num_heads)](
        partial,
        log_sums,
        output,
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        **launch_options(output.device),
    )


def _check_strides(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last axis; its strides are {tensor.stride()}")


@triton.jit
def _attend_kernel(
    query,
    key,
    value,
    pages,
    block_table,
    positions,
    page_offset,
    sinks,
    output,
    log_sums,
    scaling,
    num_splits,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    page_stride,
    slot_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    head, column, token = tl.arange(0, GROUP_ROWS), tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_TOKENS)
    in_group, in_head = (head < GROUP)[:, None], column < HEAD_DIM
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)

    position = tl.load(positions + row)
    num_cached = tl.maximum(position, 0)
    new_slot = num_cached
    if WINDOW > 0:
        num_cached = tl.minimum(num_cached, WINDOW)
        new_slot = new_slot % WINDOW
    table = block_table + row * table_stride
    offset = tl.load(page_offset).to(tl.int64)
    head_pages = pages + offset * page_stride + kv_head * head_stride
    query_row = query + row * query_row_stride + kv_head * GROUP * query_head_stride
    queries = tl.load(
        query_row + head[:, None] * query_head_stride + column[None, :],
        mask=in_group & in_head[None, :],
        other=0.0,
    )

    # The last split takes the new token, from the arguments: what it stores, no program reads.
    takes_new = (position >= 0) & (split == num_splits - 1)
    new_mask = in_head & takes_new
    new_key = tl.load(
        key + row * key_row_stride + kv_head * key_head_stride + column, mask=new_mask, other=0.0
    )
    new_value = tl.load(
        value + row * value_row_stride + kv_head * value_head_stride + column, mask=new_mask, other=0.0
    )
    new_page = tl.load(table + new_slot // PAGE_SIZE, mask=takes_new, other=0).to(tl.int64)
    new_pointers = head_pages + new_page * page_stride + (new_slot % PAGE_SIZE) * slot_stride + column
    tl.store(new_pointers, new_key, mask=new_mask)
    tl.store(new_pointers + page_stride, new_value, mask=new_mask)

    highest, total, sums = _start_softmax(
        queries, new_key, new_value, sinks, kv_head * GROUP + head, head < GROUP, takes_new, scaling, SOFTCAP
    )
    num_tiles = tl.cdiv(num_cached, BLOCK_TOKENS)
    tiles_each = tl.cdiv(num_tiles, num_splits)
    first_tile = split * tiles_each
    page = _load_pages(table, first_tile, num_cached, PAGE_SIZE, BLOCK_TOKENS)
    for tile in tl.range(first_tile, tl.minimum(first_tile + tiles_each, num_tiles)):
        slots = tile * BLOCK_TOKENS + token
        is_cached = (slots < num_cached) & (slots != new_slot)
        pointers = _key_pointers(
            head_pages, page, tile, page_stride, slot_stride, column, PAGE_SIZE, BLOCK_TOKENS
        )
        # One tile ahead: loads of keys and values that wait for this one would be pipelined half as deep.
        page = _load_pages(table, tile + 1, num_cached, PAGE_SIZE, BLOCK_TOKENS)
        mask = is_cached[:, None] & in_head[None, :]
        keys = tl.load(pointers, mask=mask, other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        logits = tl.where(is_cached[None, :], _base2_logits(products, scaling, SOFTCAP), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(logits - new_highest[:, None])
        values = tl.load(pointers + page_stride, mask=mask, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest

    # Without anything to attend to, an inactive row or an empty split, all sums are zero.
    total = tl.where(total == 0, 1.0, total)
    part = ((row * tl.num_programs(1) + kv_head) * GROUP + head) * num_splits + split
    tl.store(
        output + part[:, None] * HEAD_DIM + column[None, :],
        (sums / total[:, None]).to(output.dtype.element_ty),
        mask=in_group & in_head[None, :],
    )
    if log_sums is not None:
        tl.store(log_sums + part, highest + tl.log2(total), mask=head < GROUP)


@triton.jit
def _start_softmax(
    queries, new_key, new_value, sinks, head, in_group, takes_new, scaling, SOFTCAP: tl.constexpr
):
    """Highest logit, denominator and weighted sum of values after the new token and the sink, or after nothing."""
    products = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
    logit = _base2_logits(products, scaling, SOFTCAP)
    if sinks is None:
        highest = logit
        total = tl.exp2(logit - highest)
    else:
        sink = tl.load(sinks + head, mask=in_group, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.maximum(logit, sink)
        total = tl.exp2(logit - highest) + tl.exp2(sink - highest)
    sums = tl.exp2(logit - highest)[:, None] * new_value.to(tl.float32)[None, :]
    highest = tl.where(takes_new, highest, LOWEST_LOGIT)
    return highest, tl.where(takes_new, total, 0.0), tl.where(takes_new, sums, 0.0)


@triton.jit
def _base2_logits(products, scaling, SOFTCAP: tl.constexpr):
    """Logits times log2(e), so that exp2 serves for exp."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which holds its limits when exp overflows.
        power = tl.exp2(products * (scaling * (2 * LOG2_E / SOFTCAP)))
        return (SOFTCAP * LOG2_E) * (1 - 2 / (power + 1))
    return products * (scaling * LOG2_E)


@triton.jit
def _load_pages(table, tile, num_cached, PAGE_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Table entries of a tile: one scalar if a page holds whole tiles, else one a token; 0 beyond what is cached."""
    slots = tile * BLOCK_TOKENS
    if PAGE_SIZE % BLOCK_TOKENS != 0:
        slots += tl.arange(0, BLOCK_TOKENS)
    return tl.load(table + slots // PAGE_SIZE, mask=slots < num_cached, other=0)


@triton.jit
def _key_pointers(
    head_pages,
    page,
    tile,
    page_stride,
    slot_stride,
    column,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Addresses of a tile of keys [BLOCK_TOKENS, columns]; those of the values are one page further."""
    token = tl.arange(0, BLOCK_TOKENS)
    first_slot = tile * BLOCK_TOKENS
    page = page.to(tl.int64) * page_stride
    if PAGE_SIZE % BLOCK_TOKENS == 0:
        first = head_pages + page + (first_slot % PAGE_SIZE) * slot_stride
        return first + (token[:, None] * slot_stride + column[None, :])
    return head_pages + (page + ((first_slot + token) % PAGE_SIZE) * slot_stride)[:, None] + column[None, :]


@triton.jit
def _combine_kernel(
    partial,
    log_sums,
    output,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Weigh the parts of a head by their shares of the softmax's denominator."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, BLOCK_DIM)
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    parts = place * num_splits + split
    log_sum = tl.load(log_sums + parts, mask=split < num_splits, other=float("-inf"))
    # An empty split has the lowest logit, and no weight beside another that is not.
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    mask = (weight != 0)[:, None] & (column < HEAD_DIM)[None, :]
    values = tl.load(partial + parts[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    result = tl.sum(weight[:, None] * values, 0) / tl.sum(weight, 0)
    tl.store(output + place * HEAD_DIM + column, result.to(output.dtype.element_ty), mask=column < HEAD_DIM)
