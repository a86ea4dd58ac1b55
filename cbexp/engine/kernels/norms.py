"""What stands between the matrix products of a decode step: embeddings, residuals and their RMS norms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.heads import load_sum
from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor


@triton.jit
def _normalise(hidden, weight, columns, inside, N: tl.constexpr, eps, dtype: tl.constexpr):
    """Llama's RMS norm: float32 inside, rounded to the model's dtype before the weight multiplies it."""
    variance = tl.sum(hidden * hidden, axis=0) / N
    scaled = (hidden * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    return (scaled * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)).to(dtype)


@triton.jit
def _embed_norm_kernel(
    token_ids,
    table,
    weight,
    residual,
    out,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    token = tl.load(token_ids + row).to(tl.int64)
    hidden = tl.load(table + token * N + columns, mask=inside, other=0.0)
    place = row.to(tl.int64) * N + columns
    tl.store(residual + place, hidden, mask=inside)
    normed = _normalise(hidden.to(tl.float32), weight, columns, inside, N, eps, out.dtype.element_ty)
    tl.store(out + place, normed, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    parts,
    residual,
    weight,
    summed,
    out,
    num_rows,
    eps,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    place = row * N + columns
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    hidden = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    added = load_sum(parts, place, inside, num_rows.to(tl.int64) * N, SPLITS, dtype)
    hidden = (hidden + added).to(dtype)
    tl.store(summed + place, hidden, mask=inside)
    normed = _normalise(hidden.to(tl.float32), weight, columns, inside, N, eps, dtype)
    tl.store(out + place, normed, mask=inside)


def _num_warps(block: int) -> int:
    return min(8, max(1, block // 512))


def embed_norm(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the embeddings of `token_ids` [rows] and their RMS norm, both [rows, hidden]."""
    num_rows, num_columns = token_ids.shape[0], table.shape[1]
    residual = torch.empty((num_rows, num_columns), dtype=table.dtype, device=table.device)
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(num_columns)
    _embed_norm_kernel[(num_rows,)](
        token_ids,
        table,
        weight,
        residual,
        out,
        eps,
        N=num_columns,
        BLOCK=block,
        num_warps=_num_warps(block),
        **launch_options(table.device),
    )
    return residual, out


def add_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of `parts` [splits, rows, hidden] and `residual` [rows, hidden], and the RMS norm of that."""
    splits, num_rows, num_columns = parts.shape
    summed, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(num_columns)
    _add_norm_kernel[(num_rows,)](
        parts,
        residual,
        weight,
        summed,
        out,
        num_rows,
        eps,
        N=num_columns,
        SPLITS=splits,
        BLOCK=block,
        num_warps=_num_warps(block),
        **launch_options(residual.device),
    )
    return summed, out
