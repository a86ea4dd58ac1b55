"""Paged decode attention as an operator: what model code calls, compiled or not, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from cbexp.engine.attention_reference import paged_decode_reference
from cbexp.engine.operators import operator

__all__ = ["paged_decode_attention"]


@operator("paged_decode_attention", mutates_args={"pages"})
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
) -> Tensor:
    """Do what `paged_decode_reference` describes; any device but a CUDA one uses it.

    An operator of its own, since a compiler that sees it declares one mutation of `pages` instead of copying the cache.
    """
    inputs = (query, key, value, pages, block_table, positions, page_offset)
    if query.is_cuda:
        from cbexp.engine.kernels import paged_attention  # late: needs Triton

        attended: Tensor = paged_attention.paged_decode_attention(
            *inputs, scaling=scaling, window=window, softcap=softcap, sinks=sinks
        )
        return attended
    return paged_decode_reference(
        *inputs,
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
        num_slots=_used_slots(positions[: len(query)], window),
    )


@paged_decode_attention.register_fake
def _(query: Tensor, *_inputs: Tensor | float | None) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _used_slots(positions: Tensor, window: int) -> int:
    """Slots that some row reaches: the reference gathers every slot that it is given."""
    num_slots = max(1, int(positions.max()) + 1)
    return min(num_slots, window) if window else num_slots
