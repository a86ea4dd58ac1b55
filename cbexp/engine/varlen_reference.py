"""Attention over packed sequences of different lengths in plain torch: one sequence after the other, on any device.

Queries are the last `len_q` of a sequence's `len_k` positions. Tensors are packed as [heads, tokens, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine.sequence_spans import SequenceSpan

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
