"""Inputs for tests of paged decode attention, and its definition as loops over rows and heads."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cbexp.engine.paged_attention_op import paged_decode_attention


@dataclass
class PagedCase:
    """Arguments of one call. Every slot that no row has written holds NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    block_table: Tensor
    positions: Tensor
    page_offset: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, attend, **more) -> tuple[Tensor, Tensor]:
        """The output of `attend`, and the pages that it leaves behind."""
        pages = self.pages.clone()
        tensors = (
            self.query,
            self.key,
            self.value,
            pages,
            self.block_table,
            self.positions,
            self.page_offset,
        )
        return attend(*tensors, **self.options, **more), pages


def build_case(
    positions,
    *,
    heads=4,
    kv_heads=2,
    head_dim=16,
    page_size=4,
    dtype=torch.float32,
    device="cpu",
    window=0,
    softcap=0.0,
    sinks=False,
    table_width=None,
    seed=0,
) -> PagedCase:
    """Rows at `positions` (-1: inactive) with shuffled pages of a layer of rank 1 in a cache of two layers."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    rows = len(positions)
    lengths = [min(position + 1, window) if window else position + 1 for position in positions]
    width = table_width or max(1, -(-max(lengths) // page_size))
    pages_per_block, num_blocks = 4, rows * width + 1
    blocks = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    block_table = (blocks.view(rows, width) * pages_per_block).int()
    pages = torch.full(
        (num_blocks * pages_per_block, page_size, kv_heads, head_dim), float("nan"), device=device
    ).to(dtype)
    offset = 2
    for row, position in enumerate(positions):
        stored = min(position, window) if window else position
        if stored <= 0:
            continue
        slots = torch.arange(stored, device=device)
        if window and position >= window:
            slots = slots[slots != position % window]
        page = block_table[row, slots // page_size].long() + offset
        for kind in (0, 1):
            pages[page + kind, slots % page_size] = randn(len(slots), kv_heads, head_dim)
    # Strides as a fused projection has them: query, key and value side by side in a row.
    packed = randn(rows, heads + 2 * kv_heads, head_dim)
    query, key, value = packed.split([heads, kv_heads, kv_heads], dim=1)
    options = {"scaling": head_dim**-0.5, "window": window, "softcap": softcap}
    options["sinks"] = randn(heads) if sinks else None
    index = {"dtype": torch.int32, "device": device}
    return PagedCase(
        query,
        key,
        value,
        pages,
        block_table,
        torch.tensor(positions, **index),
        torch.tensor(offset, **index),
        options,
    )


def attend_naively(
    query, key, value, pages, block_table, positions, page_offset, *, scaling, window, softcap, sinks
) -> Tensor:
    """The definition, in float64 and Python loops."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    group, page_size = query.shape[1] // key.shape[1], pages.shape[1]
    for row in range(len(query)):
        position = int(positions[row])
        if position < 0:
            continue
        places = []
        first = max(0, position + 1 - window) if window else 0
        for earlier in range(first, position + 1):
            slot = earlier % window if window else earlier
            page = int(block_table[row, slot // page_size]) + int(page_offset)
            places.append((page, slot % page_size))
        page, in_page = places[-1]
        pages[page, in_page] = key[row]
        pages[page + 1, in_page] = value[row]
        for head in range(query.shape[1]):
            logits = []
            for page, in_page in places:
                product = torch.dot(query[row, head].double(), pages[page, in_page, head // group].double())
                logit = float(product) * scaling
                logits.append(softcap * math.tanh(logit / softcap) if softcap else logit)
            denominator = sum(math.exp(logit) for logit in logits)
            denominator += math.exp(float(sinks[head])) if sinks is not None else 0.0
            for logit, (page, in_page) in zip(logits, places, strict=True):
                share = math.exp(logit) / denominator
                output[row, head] += share * pages[page + 1, in_page, head // group].double()
    return output


def run_operator(*tensors, scaling, window, softcap, sinks) -> Tensor:
    """The operator, called as the functions are."""
    return paged_decode_attention(*tensors, scaling, window, softcap, sinks)
