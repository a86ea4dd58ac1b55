"""The engine's attention in plain torch: what runs without a GPU's kernels, and the oracle of their tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

# Paged decode


def paged_decode_reference(
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

    Returns:
        [rows, num_heads, head_dim] in the query's dtype; half precision is computed in float32.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    positions = positions[:rows].long()
    key_pages = block_table[:rows].long() + page_offset
    _write_new_token(key, value, pages, key_pages, positions, window)

    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    num_slots = _used_slots(positions, window, key_pages.shape[1] * pages.shape[1])
    keys = _gather(pages, key_pages, num_slots).to(compute_dtype)
    values = _gather(pages, key_pages + 1, num_slots).to(compute_dtype)
    num_stored = (positions + 1).clamp(max=window) if window else positions + 1
    is_stored = torch.arange(num_slots, device=query.device) < num_stored[:, None]

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


def _used_slots(positions: Tensor, window: int, num_slots: int) -> int:
    """Slots that some row reaches, so that others need not be gathered; all of them where positions have no data."""
    if type(positions) is not Tensor or not positions.is_cpu:
        return num_slots
    return min(max(1, int(positions.max()) + 1), window or num_slots)


def _gather(pages: Tensor, row_pages: Tensor, num_slots: int) -> Tensor:
    """The first slots of each row's pages [rows, columns]: [rows, slots, num_kv_heads, head_dim]."""
    num_columns = -(-num_slots // pages.shape[1])
    return pages[:, :num_slots][row_pages[:, :num_columns]].flatten(1, 2)[:, :num_slots]


def _write_new_token(
    key: Tensor, value: Tensor, pages: Tensor, key_pages: Tensor, positions: Tensor, window: int
) -> None:
    """Store the active rows' keys and values; shapes do not depend on how many rows are active."""
    is_active = positions >= 0
    slots = positions.clamp(min=0)
    slots = slots % window if window else slots
    # An inactive row repeats the first active row's write, since its own pages may be another request's by now.
    rows = torch.arange(positions.shape[0], device=positions.device)  # not len(): it would bind a shape
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


# Packed sequences of different lengths, one after the other. Queries are the last of a sequence's positions.


class SequenceSpan(NamedTuple):
    """Where one sequence lies in the packed queries and keys; its queries are the last of its keys' positions."""

    queries: slice
    keys: slice

    @property
    def num_keys(self) -> int:
        """Keys of the sequence, those of its queries included."""
        return int(self.keys.stop - self.keys.start)

    @property
    def num_past(self) -> int:
        """Keys before the first query's own."""
        return self.num_keys - int(self.queries.stop - self.queries.start)


def read_spans(cumulative_q: Tensor, cumulative_k: Tensor) -> list[SequenceSpan]:
    """The sequences that have queries, from cumulative lengths (int [num_sequences + 1], beginning with 0)."""
    ends_q, ends_k = _host_values(cumulative_q), _host_values(cumulative_k)
    return [
        SequenceSpan(slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1]))
        for i in range(len(ends_q) - 1)
        if ends_q[i] < ends_q[i + 1]
    ]


# Tensor -> (version of its content, values). All layers of a step are given the same tensors, which are read once.
_values_read = WeakTensorKeyDictionary()


def _host_values(tensor: Tensor) -> list[int]:
    if tensor.device.type == "cpu" or tensor.is_inference():
        values: list[int] = tensor.tolist()
        return values
    known = _values_read.get(tensor)
    if known is None or known[0] != tensor._version:
        known = (tensor._version, tensor.tolist())
        _values_read[tensor] = known
    return list(known[1])


# Elements of the score matrix that the plain path makes at a time: 256 MiB in fp32.
MAX_SCORES = 2**26

# (query, key, value, span) -> output, all [num_heads, tokens of the sequence, head_dim].
SequenceAttention = Callable[[Tensor, Tensor, Tensor, SequenceSpan], Tensor]


def attend_with_sdpa(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[SequenceSpan], *, scaling: float, window: int
) -> Tensor:
    """The scaled dot-product attention of torch, sequence by sequence; no soft cap and no sinks.

    query [num_heads, total_q, head_dim], key and value [num_kv_heads, total_k, head_dim]; `window` 0 means all keys.
    Returns [total_q, num_heads, head_dim]; zeros for queries in no span.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, span: SequenceSpan) -> Tensor:
        is_plainly_causal = span.num_past == 0 and not _is_cut(span, window)
        return functional.scaled_dot_product_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=None if is_plainly_causal else _visible_keys(span, window, query.device),
            is_causal=is_plainly_causal,
            scale=scaling,
        ).squeeze(0)

    return _attend_spans(query, key, value, spans, attend)


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[SequenceSpan],
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Matrix products and a softmax in fp32: the oracle, and what serves soft caps and attention sinks everywhere.

    Shapes as in `attend_with_sdpa`. `softcap` > 0 bends scores to cap * tanh(score / cap); `sinks` [num_heads] adds a
    logit without a value to each head's softmax. The order of operations is that of transformers' eager attention.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, span: SequenceSpan) -> Tensor:
        num_rows = max(1, MAX_SCORES // (query.shape[0] * key.shape[1]))
        mask = _visible_keys(span, window, query.device)
        output = torch.empty_like(query)
        for start in range(0, query.shape[1], num_rows):
            rows = slice(start, start + num_rows)
            visible = None if mask is None else mask[rows]
            output[:, rows] = _softmax_weights(query[:, rows], key, visible, scaling, softcap, sinks) @ value
        return output

    return _attend_spans(query, key, value, spans, attend)


def _attend_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[SequenceSpan],
    attend: SequenceAttention,
) -> Tensor:
    num_groups = query.shape[0] // key.shape[0]
    output = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
    for span in spans:
        own_keys, own_values = (
            tensor[:, span.keys].repeat_interleave(num_groups, dim=0) for tensor in (key, value)
        )
        output[span.queries] = attend(query[:, span.queries], own_keys, own_values, span).transpose(0, 1)
    return output


def _is_cut(span: SequenceSpan, window: int) -> bool:
    """Whether the window hides a key of the sequence from its last query."""
    return 0 < window < span.num_keys


def _visible_keys(span: SequenceSpan, window: int, device: torch.device) -> Tensor | None:
    """Bool [len_q, len_k], True where a query sees a key; None when the only query sees every key."""
    if span.num_past == span.num_keys - 1 and not _is_cut(span, window):
        return None
    positions = torch.arange(span.num_keys, device=device)
    distance = positions[span.num_past :, None] - positions
    visible = distance >= 0
    return visible & (distance < window) if window else visible


def _softmax_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    scores = query @ key.transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights if sinks is None else weights[..., :-1]
