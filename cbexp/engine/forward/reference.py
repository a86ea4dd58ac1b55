"""What the operators of fused forwards compute, in plain torch: for devices without Triton, and as an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine.attention import paged_decode_attention


def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """`x @ weight.T + bias` for each weight [out_features, in_features], x being [..., in_features].

    As many biases [out_features] as weights, or none.
    """
    if not biases:
        return [functional.linear(x, weight) for weight in weights]
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def embed_norm(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Embeddings of `token_ids` [rows] and their RMS norm, both [rows, hidden]."""
    residual = functional.embedding(token_ids, table)
    return residual, rms_norm(residual, weight, eps)


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
    """Queries, keys and values [rows, heads, head_dim] of x [rows, hidden]; queries and keys are normed and rotated.

    `weights` and `biases` as in `joint_linear`; norms [head_dim]; `cos` and `sin` [max_positions, head_dim], of which a
    position below 0 takes the first.
    """
    head_dim = cos.shape[1]
    query, key, value = (
        projected.unflatten(-1, (-1, head_dim)) for projected in joint_linear(x, weights, biases)
    )
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    places = positions.clamp(min=0).long()
    turns = cos[places][:, None], sin[places][:, None]
    return _rotate(query, *turns), _rotate(key, *turns), value


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
    arrivals: Tensor,  # noqa: ARG001
    scaling: float,
    window: int,
) -> Tensor:
    """`rotated_projection`, then paged decode attention: [rows, num_heads * head_dim].

    `arrivals`: int32 zeros [at least rows * num_kv_heads] for the kernels, which leave zeros.
    """
    query, key, value = rotated_projection(x, weights, biases, positions, cos, sin, q_norm, k_norm, eps)
    attended: Tensor = paged_decode_attention(
        query, key, value, pages, block_table, positions, page_offset, scaling, window
    )
    return attended.flatten(1)


def project_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`residual + x @ weight.T + bias` and its RMS norm, both [rows, hidden]."""
    hidden = residual + functional.linear(x, weight, bias)
    return hidden, rms_norm(hidden, norm_weight, eps)


def gated_projection(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` [rows, n]."""
    return functional.silu(functional.linear(x, gate)) * functional.linear(x, up)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's RMS norm over the last dimension: float32 inside, rounded before the weight multiplies it."""
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(hidden.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
