"""Paged decode attention in plain torch: what runs without a GPU, and the oracle of the GPU kernel's tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["paged_decode_reference"]


def paged_decode_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    block_table: Tensor,
    positions: Tensor,
    page_offset: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_slots: int | None = None,
) -> Tensor:
    """Write each row's new key and value into its pages, then attend from its query over all the row has stored.

    A row at position p writes to its slot p, or p % window where a sliding window keeps its pages as a ring, and reads
    slots 0..p, or all `window` of them once the ring is full. A row with p < 0 is inactive: it changes no page and
    its output is zero. Whatever lies beyond a row's slots, NaN included, has no influence on its output.

    Args:
        query: [rows, num_heads, head_dim]; head h reads key-value head h // (num_heads // num_kv_heads).
        key: [rows, num_kv_heads, head_dim], of the new token.
        value: As `key`.
        pages: [num_pages, page_size, num_kv_heads, head_dim], changed in place.
        block_table: int32 [>= rows, table_width], the row's entries in order.
        positions: int32 [>= rows].
        page_offset: int32 scalar; keys are in page entry + page_offset, values in the page after it.
        scaling: factor of the products of query and key.
        window: slots of the ring; 0 without a sliding window.
        softcap: logits become softcap * tanh(logits / softcap); 0 leaves them as they are.
        sinks: [num_heads], for each head a logit that takes part in the softmax's denominator alone (GPT-OSS).
        num_slots: slots beyond which no row reads or writes, so that they need not be gathered; None: all in the table.

    Returns:
        [rows, num_heads, head_dim] in the query's dtype; half precision is computed in float32.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    positions = positions[:rows].long()
    key_pages = block_table[:rows].long() + page_offset
    _write_new_token(key, value, pages, key_pages, positions, window)

    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    keys = _gather(pages, key_pages, num_slots).to(compute_dtype)
    values = _gather(pages, key_pages + 1, num_slots).to(compute_dtype)
    num_stored = (positions + 1).clamp(max=window) if window else positions + 1
    is_stored = torch.arange(keys.shape[1], device=query.device) < num_stored[:, None]

    grouped_query = query.to(compute_dtype).unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    logits = torch.einsum("rkgd,rskd->rkgs", grouped_query, keys) * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~is_stored[:, None, None], float("-inf"))
    weights = _softmax(logits, sinks)
    # A weight of zero does not erase a NaN.
    values = values.masked_fill(~is_stored[:, :, None, None], 0.0)
    output = torch.einsum("rkgs,rskd->rkgd", weights, values).reshape(rows, num_heads, head_dim)
    return output.masked_fill((positions < 0)[:, None, None], 0.0).to(query.dtype)


def _gather(pages: Tensor, row_pages: Tensor, num_slots: int | None) -> Tensor:
    """The first slots of each row's pages [rows, columns]: [rows, slots, num_kv_heads, head_dim]."""
    page_size = pages.shape[1]
    num_slots = row_pages.shape[1] * page_size if num_slots is None else num_slots
    num_columns = -(-num_slots // page_size)
    return pages[:, :num_slots][row_pages[:, :num_columns]].flatten(1, 2)[:, :num_slots]


def _write_new_token(
    key: Tensor, value: Tensor, pages: Tensor, key_pages: Tensor, positions: Tensor, window: int
) -> None:
    """Store the active rows' keys and values; shapes do not depend on how many rows are active."""
    is_active = positions >= 0
    slots = positions.clamp(min=0)
    slots = slots % window if window else slots
    # An inactive row repeats the first active row's write, since its own pages may be another request's by now.
    rows = torch.arange(len(positions), device=positions.device)
    writer = torch.where(is_active, rows, is_active.int().argmax())
    slots = slots[writer]
    page_size = pages.shape[1]
    page = key_pages[writer, slots // page_size]
    in_page = slots % page_size
    for new, new_page in ((key, page), (value, page + 1)):
        # With no active row at all, what is there is written back.
        stored = torch.where(is_active.any(), new[writer].to(pages.dtype), pages[new_page, in_page])
        pages.index_put_((new_page, in_page), stored)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of [rows, num_kv_heads, heads a key-value head, slots]."""
    if sinks is None:
        return logits.softmax(-1)
    sink_logits = (
        sinks.to(logits.dtype).view(logits.shape[1], logits.shape[2], 1).expand(*logits.shape[:3], 1)
    )
    return torch.cat([logits, sink_logits], -1).softmax(-1)[..., :-1]
