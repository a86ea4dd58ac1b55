"""The steps of a decoder layer as operators of torch, so that torch.compile takes a forward made of them as one graph.

What each computes is defined in `reference`, by which it runs anywhere but on CUDA. Here are the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cbexp.engine.attention import paged_decode_attention
from cbexp.engine.forward import products, reference
from cbexp.engine.operators import operator


@operator(reference.joint_linear)
def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """As `reference.joint_linear`."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return [part.view(*x.shape[:-1], -1) for part in products.project_whole(flat, weights, biases)]


@operator(reference.embed_norm)
def embed_norm(*inputs: Any) -> tuple[Tensor, Tensor]:
    """As `reference.embed_norm`."""
    from cbexp.engine.kernels import norms

    return norms.embed_norm(*inputs)


@operator(reference.rotated_projection)
def rotated_projection(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.rotated_projection`."""
    from cbexp.engine.kernels import heads

    query, key, value = products.project(x, weights, biases)
    # A tensor of its own: what an operator gives may lie in nothing else.
    whole_value = value.sum(0).to(x.dtype)
    return (
        heads.norm_and_rotate(query, positions, cos, sin, q_norm, eps=eps),
        heads.norm_and_rotate(key, positions, cos, sin, k_norm, eps=eps),
        whole_value.unflatten(1, (-1, cos.shape[1])),
    )


@operator(reference.attend_new_token, mutates_args={"pages", "arrivals"})
def attend_new_token(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    pages: Tensor,
    block_table: Tensor,
    page_offset: Tensor,
    arrivals: Tensor,
    scaling: float,
    window: int,
) -> Tensor:
    """As `reference.attend_new_token`."""
    num_rows, page_size, num_kv_heads, head_dim = x.shape[0], *pages.shape[1:]
    if head_dim & (head_dim - 1):  # heads are vectors of Triton, whose sizes are powers of two
        query, key, value = rotated_projection(x, weights, biases, positions, cos, sin, q_norm, k_norm, eps)
        attended: Tensor = paged_decode_attention(
            query, key, value, pages, block_table, positions, page_offset, scaling, window
        )
        return attended.flatten(1)
    from cbexp.engine.kernels import rotated_attention, tiles

    limits, num_programs = tiles.device_limits(pages.device), num_rows * num_kv_heads
    num_slots = window or block_table.shape[1] * page_size
    query, key, value = products.project(x, weights, biases)
    attended = rotated_attention.rotated_paged_attention(
        query,
        key,
        value,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        pages,
        block_table,
        page_offset,
        arrivals,
        eps=eps,
        scaling=scaling,
        window=window,
        tile=tiles.choose_rotated_attention_tile(num_programs, head_dim, pages.itemsize, limits),
        chunk=tiles.choose_attention_chunk(num_programs, num_slots, limits),
    )
    return attended.flatten(1)


@operator(reference.project_add_norm)
def project_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `reference.project_add_norm`."""
    from cbexp.engine.kernels import norms

    [parts] = products.project(x, [weight], [] if bias is None else [bias])
    return norms.add_norm(parts, residual, norm_weight, eps)


@operator(reference.gated_projection)
def gated_projection(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """As `reference.gated_projection`."""
    return products.project_gated(x, gate, up)
