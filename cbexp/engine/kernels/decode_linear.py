"""Matrix products of a decode step: few rows against many weights, so that the weights are read at memory speed.

The rows of the weight are the long side of each tile, the batch is the short one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cbexp.engine.kernels.dependent_launch import (
    launch_options,
    prefetch_lines,
    release_successor,
    wait_for_predecessor,
)


@dataclass(frozen=True)
class LinearTile:
    """How a product is cut: tile sizes in elements, parts of the inner dimension, pipeline depth, prefetched columns."""

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0


@triton.jit
def _prefetch_weight(weight, rows, first_k, N, K, COLUMNS: tl.constexpr):
    lines: tl.constexpr = COLUMNS // 64
    if COLUMNS > 0:
        columns = first_k + tl.arange(0, lines) * 64
        inside = (rows[:, None] < N) & (columns[None, :] < K)
        pointers = weight + rows[:, None].to(tl.int64) * K + columns[None, :]
        prefetch_lines(tl.where(inside, pointers, weight))


@triton.jit
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k_each: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    first_k = split * k_each
    if DEPENDENT:
        _prefetch_weight(weight, n, first_k, N, K, PREFETCH)
    wait_for_predecessor(DEPENDENT)
    n_inside = n < N
    row_inside = row < num_rows
    weight_rows = weight + n[:, None].to(tl.int64) * K
    x_rows = x + row[None, :].to(tl.int64) * K
    acc = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, k_each, BLOCK_K, num_stages=STAGES):
        k = first_k + start + tl.arange(0, BLOCK_K)
        if K % (BLOCK_K * SPLITS) == 0:
            w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None], other=0.0)
            v = tl.load(x_rows + k[:, None], mask=row_inside[None, :], other=0.0)
        else:
            w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None] & (k < K)[None, :], other=0.0)
            v = tl.load(x_rows + k[:, None], mask=row_inside[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(w, v, acc, input_precision="ieee" if EXACT else "tf32")
    release_successor(DEPENDENT)
    inside = n_inside[:, None] & row_inside[None, :]
    if HAS_BIAS:
        if split == 0:
            acc += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
    place = (split * num_rows + row[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_up_kernel(
    x,
    weight,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # One tile of weights holds BLOCK_N rows of gate and the same rows of up.
    both = tl.arange(0, 2 * BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + both % BLOCK_N
    n = tl.where(both < BLOCK_N, column, N + column)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if DEPENDENT:
        _prefetch_weight(weight, n, 0, 2 * N, K, PREFETCH)
    wait_for_predecessor(DEPENDENT)
    n_inside = column < N
    row_inside = row < num_rows
    weight_rows = weight + n[:, None].to(tl.int64) * K
    x_rows = x + row[None, :].to(tl.int64) * K
    acc = tl.zeros([2 * BLOCK_N, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None], other=0.0)
            v = tl.load(x_rows + k[:, None], mask=row_inside[None, :], other=0.0)
        else:
            w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None] & (k < K)[None, :], other=0.0)
            v = tl.load(x_rows + k[:, None], mask=row_inside[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(w, v, acc, input_precision="ieee" if EXACT else "tf32")
    release_successor(DEPENDENT)
    gate, up = tl.split(acc.reshape(2, BLOCK_N, BLOCK_ROWS).permute(1, 2, 0))
    # Rounded where the model's own code rounds: after each product, after the activation, after their product.
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    product = activated * up.to(dtype).to(tl.float32)
    n_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = row[None, :].to(tl.int64) * N + n_out[:, None]
    tl.store(out + place, product.to(dtype), mask=(n_out < N)[:, None] & row_inside[None, :])


@triton.jit
def _head_kernel(
    x,
    weight,
    tile_values,
    tile_ids,
    num_rows,
    num_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if DEPENDENT:
        _prefetch_weight(weight, n, 0, N, K, PREFETCH)
    wait_for_predecessor(DEPENDENT)
    n_inside = n < N
    row_inside = row < num_rows
    weight_rows = weight + n[:, None].to(tl.int64) * K
    x_rows = x + row[None, :].to(tl.int64) * K
    acc = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K) if K % BLOCK_K != 0 else (k >= 0)
        w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None] & inside[None, :], other=0.0)
        v = tl.load(x_rows + k[:, None], mask=row_inside[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, v, acc, input_precision="ieee" if EXACT else "tf32")
    release_successor(DEPENDENT)
    # The model's logits have the model's dtype: rounding first keeps its ties, of which the lowest id wins.
    logits = acc.to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where(n_inside[:, None], logits, float("-inf"))
    best, index = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(tile_values + place, best, mask=row_inside)
    tl.store(tile_ids + place, tile * BLOCK_N + index, mask=row_inside)


def block_rows(num_rows: int) -> int:
    """Rows of the batch in one tile: the next power of two, from the tensor cores' 16 up to 256."""
    return min(256, max(16, triton.next_power_of_2(num_rows)))


def split_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: LinearTile
) -> torch.Tensor:
    """Return `x @ weight.T + bias` as float32 parts [splits, rows, out_features], whose sum it is.

    x [rows, in_features] and weight [out_features, in_features] contiguous, of one dtype.
    """
    num_rows, num_columns = x.shape[0], weight.shape[0]
    out = torch.empty((tile.splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    _launch_linear(x, weight, bias, out, tile)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: LinearTile
) -> torch.Tensor:
    """Return `x @ weight.T + bias` [rows, out_features] in x's dtype; `tile.splits` must be 1."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch_linear(x, weight, bias, out, tile)
    return out


def _launch_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: LinearTile
) -> None:
    num_rows, (num_columns, num_inner) = x.shape[0], weight.shape
    rows = block_rows(num_rows)
    grid = (triton.cdiv(num_columns, tile.block_n), tile.splits, triton.cdiv(num_rows, rows))
    _linear_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        N=num_columns,
        K=num_inner,
        HAS_BIAS=bias is not None,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_ROWS=rows,
        SPLITS=tile.splits,
        STAGES=tile.num_stages,
        PREFETCH=tile.prefetch,
        EXACT=x.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )


def gate_up_silu(x: torch.Tensor, weight: torch.Tensor, tile: LinearTile) -> torch.Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)` [rows, n], weight [2n, in_features] holding gate's rows before up's."""
    num_rows, num_columns, num_inner = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    rows = block_rows(num_rows)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(num_columns, tile.block_n), triton.cdiv(num_rows, rows))](
        x,
        weight,
        out,
        num_rows,
        N=num_columns,
        K=num_inner,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_ROWS=rows,
        STAGES=tile.num_stages,
        PREFETCH=tile.prefetch,
        EXACT=x.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


def head_maxima(x: torch.Tensor, weight: torch.Tensor, tile: LinearTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit (float32) and its id (int32) in each tile of the vocabulary, both [rows, tiles]."""
    num_rows, num_columns, num_inner = x.shape[0], weight.shape[0], weight.shape[1]
    num_tiles = triton.cdiv(num_columns, tile.block_n)
    rows = block_rows(num_rows)
    values = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x.device)
    _head_kernel[(num_tiles, triton.cdiv(num_rows, rows))](
        x,
        weight,
        values,
        ids,
        num_rows,
        num_tiles,
        N=num_columns,
        K=num_inner,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BLOCK_ROWS=rows,
        STAGES=tile.num_stages,
        PREFETCH=tile.prefetch,
        EXACT=x.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return values, ids
