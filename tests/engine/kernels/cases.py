"""Inputs for tests of kernels and operators, and paged attention's definition by rows and heads."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cbexp.engine import sampling
from cbexp.engine.attention import paged_decode_reference
from cbexp.engine.buffers import SamplingColumn, allocate_buffers, pack_ids, set_width
from cbexp.engine.forward import reference

EPS = 1e-6


def mostly_slow(*cases, num_fast=1):
    """Parameters of a test, of which the default suite takes the first alone."""
    slow = [case if isinstance(case, tuple) else (case,) for case in cases[num_fast:]]
    return [*cases[:num_fast], *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


def randn(*shape, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def rotary_tables(num_positions, head_dim, dtype, device="cpu") -> tuple[Tensor, Tensor]:
    """As Llama's: the angles of the first half of a head are those of the second."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(num_positions, device=device), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def is_same(actual, expected) -> Tensor:
    """Where two tensors are equal, or both NaN."""
    return actual.eq(expected) | (actual.isnan() & expected.isnan())


def packed_batch(
    lengths, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu"
) -> list[Tensor]:
    """Query, key and value of sequences of `lengths` (queries, keys), side by side [1, heads, tokens, head_dim]."""
    num_queries, num_keys = map(sum, zip(*lengths, strict=True))
    sizes = (num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads)
    # As model code has it: heads and tokens are the transposed dimensions of one projection.
    return [
        randn(1, *size, head_dim, dtype=dtype, device=device, seed=seed).transpose(1, 2)
        for seed, size in enumerate(sizes)
    ]


def step_kwargs(lengths, device="cpu") -> dict[str, Any]:
    """What transformers tells a layer of the sequences' lengths."""
    columns = list(zip(*lengths, strict=True))
    ends_q, ends_k = (torch.tensor([0, *column]).cumsum(0).int().to(device) for column in columns)
    max_q, max_k = map(max, columns)
    return {"cu_seq_lens_q": ends_q, "cu_seq_lens_k": ends_k, "max_length_q": max_q, "max_length_k": max_k}


@dataclass
class PagedCase:
    """Arguments of one call of paged attention. Every slot that no row has written holds NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    block_table: Tensor
    positions: Tensor
    page_offset: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        own = [self.query, self.key, self.value, self.pages]
        return [*own, self.block_table, self.positions, self.page_offset]

    def run(self, attend, **more) -> tuple[Tensor, Tensor]:
        """The output of `attend`, and the pages that it leaves behind."""
        tensors = self.tensors()
        tensors[3] = pages = self.pages.clone()
        return attend(*tensors, **self.options, **more), pages


def build_paged_case(
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
    longest = max(positions) + 1
    width = table_width or max(1, -(-min(longest, window or longest) // page_size))
    pages_per_block, num_blocks = 4, rows * width + 1
    blocks = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    block_table = (blocks.view(rows, width) * pages_per_block).int()
    shape = (num_blocks * pages_per_block, page_size, kv_heads, head_dim)
    pages = torch.full(shape, float("nan"), device=device).to(dtype)
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
    # Strides of a joint projection: query, key and value side by side in a row.
    packed = randn(rows, heads + 2 * kv_heads, head_dim)
    query, key, value = packed.split([heads, kv_heads, kv_heads], dim=1)
    sinks = randn(heads) if sinks else None
    options = {"scaling": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
    places = (torch.tensor(each, dtype=torch.int32, device=device) for each in (positions, offset))
    return PagedCase(query, key, value, pages, block_table, *places, options)


def attend_naively(
    query, key, value, pages, block_table, positions, page_offset, *, scaling, window, softcap, sinks
) -> Tensor:
    """The definition, in float64, by row and head."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    group, page_size = query.shape[1] // key.shape[1], pages.shape[1]
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        first = max(0, position + 1 - window) if window else 0
        slots = [token % window if window else token for token in range(first, position + 1)]
        at = [int(block_table[row, slot // page_size] + page_offset) for slot in slots]
        in_page = [slot % page_size for slot in slots]
        pages[at[-1], in_page[-1]], pages[at[-1] + 1, in_page[-1]] = key[row], value[row]
        for head in range(query.shape[1]):
            keys = pages[at, in_page, head // group].double()
            values = pages[[page + 1 for page in at], in_page, head // group].double()
            logits = keys @ query[row, head].double() * scaling
            weights = (softcap * torch.tanh(logits / softcap) if softcap else logits).exp()
            denominator = weights.sum() + (sinks[head].double().exp() if sinks is not None else 0)
            output[row, head] = weights @ values / denominator
    return output


@dataclass
class ProjectedCase:
    """Arguments of one call of the fused attention, whose definition are two references.

    Projections in parts [splits, rows, heads * head_dim], what turns them into heads, and the pages.
    """

    parts: list[Tensor]
    rotary: tuple[Tensor, Tensor]
    norms: list[Tensor | None]
    paged: PagedCase

    def expected_heads(self) -> list[Tensor]:
        """Of the reference, which projects by itself: a product with one is the projection."""
        dtype = self.rotary[0].dtype
        projected = torch.cat([parts.float().sum(0).to(dtype) for parts in self.parts], 1)
        weights = torch.eye(projected.shape[1], dtype=dtype).split([parts.shape[2] for parts in self.parts])
        others = self.paged.positions, *self.rotary, *self.norms, EPS
        return list(reference.rotated_projection(projected, weights, [], *others))

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output, and the pages left behind."""
        self.paged.query, self.paged.key, self.paged.value = self.expected_heads()
        return self.paged.run(paged_decode_reference)

    def run(self, attend, chunk: int = 1024, **tile: Any) -> tuple[Tensor, Tensor]:
        paged, pages = self.paged, self.paged.pages.clone()
        arrivals = torch.zeros(len(paged.positions) * pages.shape[2], dtype=torch.int32)
        heads = *self.parts, paged.positions, *self.rotary, *self.norms
        place = pages, paged.block_table, paged.page_offset, arrivals
        options = {name: paged.options[name] for name in ("scaling", "window")}
        output = attend(*heads, *place, eps=EPS, chunk=chunk, **options, **tile)
        assert not arrivals.any()
        return output, pages


def build_projected_case(positions, *, splits=2, norms=True, **options: Any) -> ProjectedCase:
    paged = build_paged_case(positions, **options)
    dtype, head_dim = paged.pages.dtype, paged.pages.shape[3]
    # One part is a product of the vendor's library, in the model's dtype.
    parts_dtype = dtype if splits == 1 else torch.float32
    widths = [heads.shape[1] * head_dim for heads in (paged.query, paged.key, paged.value)]
    return ProjectedCase(
        [randn(splits, len(positions), n, dtype=parts_dtype, seed=seed) for seed, n in enumerate(widths)],
        rotary_tables(max(positions) + 1, head_dim, dtype),
        [1 + randn(head_dim, dtype=dtype, seed=seed) if norms else None for seed in (3, 4)],
        paged,
    )


def check_advance(advance, rows, eos_token_ids, device="cpu") -> None:
    """`advance` does in some steps of `rows` of the buffers' what plain torch does on the CPU."""
    generator, max_rows = torch.Generator().manual_seed(rows), rows + 2

    def draw(high, low=0, num=max_rows):
        return torch.randint(low, high, (num,), generator=generator)

    start = {"token_ids": draw(10), "positions": draw(30, -3).clamp(min=-1), "remaining": draw(5)}
    options = {"max_rows": max_rows, "max_burst": 6, "eos_token_ids": eos_token_ids}
    plain, own = (allocate_buffers({}, **options, device=torch.device(each)) for each in ("cpu", device))
    for buffers in (plain, own):
        for name, value in start.items():
            getattr(buffers, name).copy_(value)
    for step in range(6):
        next_ids, logits = draw(10, num=rows), torch.randn(rows, generator=generator)
        logits[0] = float("nan") if step == 5 else 0.5
        sampling.advance(plain, next_ids, logits)
        advance(own, next_ids.to(device), logits.to(device))
        assert all(is_same(a.cpu(), b).all() for a, b in zip(own.state(), plain.state(), strict=True))


def build_sampling_case(logits, rows, device="cpu", seed=0) -> list[Tensor]:
    """Arguments of `sampling.sample`: each row's settings by name, and prompts that have seen every third token."""
    num_rows, vocab_size = logits.shape
    width = set_width(vocab_size)
    suppressed = range(0, vocab_size, 3)
    stops = range(1, vocab_size, 5)
    sets = torch.stack([pack_ids(ids, width) for ids in ((), stops, suppressed)])
    settings = torch.zeros((num_rows, len(SamplingColumn)), dtype=torch.int32)
    floats = settings.view(torch.float32)
    for index, row in enumerate(rows):
        floats[index, SamplingColumn.TEMPERATURE] = row.get("temperature", 0.0)
        settings[index, SamplingColumn.TOP_K] = row.get("top_k", 0)
        floats[index, SamplingColumn.TOP_P] = row.get("top_p", 1.0)
        floats[index, SamplingColumn.MIN_P] = row.get("min_p", 0.0)
        floats[index, SamplingColumn.REPETITION_PENALTY] = row.get("penalty", 1.0)
        settings[index, SamplingColumn.FIRST_STOP] = 100 if row.get("is_early") else 0
        settings[index, SamplingColumn.STOP_SET] = 1
        settings[index, SamplingColumn.SUPPRESSED_SET] = 2 if row.get("suppressed") else 0
        settings[index, SamplingColumn.GENERATION] = index
    seen = pack_ids(range(2, vocab_size, 3), width).expand(num_rows, -1).contiguous()
    positions = torch.arange(num_rows, dtype=torch.int32)
    key = torch.tensor([seed, 7], dtype=torch.int32)
    return [tensor.to(device) for tensor in (logits, settings, positions, seen, sets, key)]


def check_sampled(actual, expected) -> None:
    """The same tokens, but for one in a few hundred at the border of two, and their log-probabilities."""
    is_same_token = actual[0] == expected[0]
    assert int((~is_same_token).sum()) <= len(is_same_token) // 100
    torch.testing.assert_close(actual[1][is_same_token], expected[1][is_same_token])
    torch.testing.assert_close(actual[2][is_same_token], expected[2][is_same_token], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[2][:, 3], expected[2][:, 3], rtol=1e-4, atol=1e-4)
