"""What the fused kernels compute, in plain torch: for devices without Triton, and as the oracle of their tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine.sampling import choose_best


def embed_norm(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Embeddings of `token_ids` [rows] and their RMS norm, both [rows, hidden]."""
    residual = functional.embedding(token_ids, table)
    return residual, rms_norm(residual, weight, eps)


def rotated_projection(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Queries, keys, values [rows, num_heads + 2 * num_kv_heads, head_dim] of x [rows, hidden], normed and rotated."""
    heads = [num_heads, num_kv_heads, num_kv_heads]
    projected = functional.linear(x, weight, bias).view(x.shape[0], sum(heads), -1)
    query, key, value = projected.split(heads, dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    if cos is not None and sin is not None:
        places = positions.clamp(min=0).long()
        turns = cos[places][:, None], sin[places][:, None]
        query, key = _rotate(query, *turns), _rotate(key, *turns)
    return torch.cat((query, key, value), dim=1)


def project_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`residual + x @ weight.T + bias` and its RMS norm, both [rows, hidden]."""
    hidden = residual + functional.linear(x, weight, bias)
    return hidden, rms_norm(hidden, norm_weight, eps)


def gated_projection(x: Tensor, weight: Tensor) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` [rows, n]; weight [2n, hidden] has gate's rows before up's."""
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def best_tokens(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Id (int64 [rows]) of the largest logit of x [rows, hidden], of equals the lowest, and that logit in float32."""
    return choose_best(functional.linear(x, weight))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's RMS norm over the last dimension: float32 inside, rounded before the weight multiplies it."""
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(hidden.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
