"""Inputs for tests of the fused kernels, and the attention kernel's definition out of two references."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbexp.engine import fused_reference
from cbexp.engine.attention_reference import paged_decode_reference
from tests.engine.paged_attention_cases import PagedCase, build_case

EPS = 1e-6


def randn(*shape, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def rotary_tables(num_positions, head_dim, dtype, device="cpu") -> tuple[Tensor, Tensor]:
    """As Llama's: the angles of the first half of a head are those of the second."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(num_positions, device=device), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass
class ProjectedCase:
    """A projection in parts [splits, rows, (heads + 2 * kv_heads) * head_dim], and what turns it into heads."""

    parts: Tensor
    positions: Tensor
    rotary: tuple[Tensor, Tensor] | None
    norms: tuple[Tensor, Tensor] | None
    heads: int
    kv_heads: int
    dtype: torch.dtype

    def expected_heads(self) -> Tensor:
        """Of the reference, which projects by itself: a product with one is the projection."""
        projected = self.parts.float().sum(0).to(self.dtype)
        one = torch.eye(projected.shape[1], dtype=self.dtype, device=projected.device)
        cos, sin = self.rotary or (None, None)
        q_norm, k_norm = self.norms or (None, None)
        return fused_reference.rotated_projection(
            projected, one, None, self.positions, cos, sin, q_norm, k_norm, EPS, self.heads, self.kv_heads
        )


def build_projected_case(
    positions,
    *,
    heads=4,
    kv_heads=2,
    head_dim=16,
    splits=2,
    norms=True,
    rotary=True,
    dtype=torch.float32,
    device="cpu",
) -> ProjectedCase:
    width = (heads + 2 * kv_heads) * head_dim
    kind = {"dtype": dtype, "device": device}
    return ProjectedCase(
        # One part is a product of the vendor's library, in the model's dtype.
        parts=randn(splits, len(positions), width, device=device, dtype=dtype if splits == 1 else None),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        rotary=rotary_tables(max(positions) + 1, head_dim, dtype, device) if rotary else None,
        norms=(1 + randn(head_dim, seed=1, **kind), 1 + randn(head_dim, seed=2, **kind)) if norms else None,
        heads=heads,
        kv_heads=kv_heads,
        dtype=dtype,
    )


@dataclass
class RotatedAttentionCase:
    """Arguments of one call of the fused attention."""

    projected: ProjectedCase
    paged: PagedCase

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output, and the pages left behind."""
        projected = self.projected
        sizes = [projected.heads, projected.kv_heads, projected.kv_heads]
        paged = self.paged
        paged.query, paged.key, paged.value = projected.expected_heads().split(sizes, dim=1)
        return paged.run(paged_decode_reference)

    def run(self, attend, chunk: int = 1024, **tile: Any) -> tuple[Tensor, Tensor]:
        paged, projected, pages = self.paged, self.projected, self.paged.pages.clone()
        assert projected.rotary is not None
        num_tasks = len(projected.positions) * projected.kv_heads
        arrivals = torch.zeros(num_tasks, dtype=torch.int32, device=pages.device)
        output = attend(
            projected.parts,
            projected.positions,
            *projected.rotary,
            projected.norms,
            pages,
            paged.block_table,
            paged.page_offset,
            arrivals,
            eps=EPS,
            scaling=paged.options["scaling"],
            window=paged.options["window"],
            num_heads=projected.heads,
            chunk=chunk,
            **tile,
        )
        assert not arrivals.any()
        return output, pages


def build_rotated_case(
    positions, *, window=0, page_size=4, splits=2, norms=True, **shape: Any
) -> RotatedAttentionCase:
    return RotatedAttentionCase(
        build_projected_case(positions, splits=splits, norms=norms, **shape),
        build_case(positions, window=window, page_size=page_size, **shape),
    )
