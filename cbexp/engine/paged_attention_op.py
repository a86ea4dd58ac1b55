"""Paged decode attention as an operator: what model code calls, compiled or not, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cbexp.engine.attention_reference import paged_decode_reference

__all__ = ["paged_decode_attention"]


@torch.library.custom_op("cbexp::paged_decode_attention", mutates_args={"pages"})
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
    attend: Callable[..., Tensor] = paged_decode_reference
    if query.is_cuda:
        from cbexp.engine.kernels import paged_attention  # late: needs Triton

        attend = paged_attention.paged_decode_attention
    else:
        block_table = _used_columns(block_table, positions[: len(query)], window, page_size=pages.shape[1])
    return attend(
        query,
        key,
        value,
        pages,
        block_table,
        positions,
        page_offset,
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


@paged_decode_attention.register_fake
def _(query: Tensor, *_inputs: Tensor | float | None) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _used_columns(block_table: Tensor, positions: Tensor, window: int, *, page_size: int) -> Tensor:
    """Leave out the columns that no row reaches: the reference gathers every page that it is given."""
    num_slots = int(positions.max()) + 1
    if window:
        num_slots = min(num_slots, window)
    return block_table[:, : max(1, -(-num_slots // page_size))]
