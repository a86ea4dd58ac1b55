"""Matrix products of a decode step: few rows against many weights, so that the weights are read at memory speed.

The rows of the weight are the long side of each tile, the batch is the short one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.dependent_launch import (
    launch_options,
    release_successor,
    wait_for_predecessor,
)
from cbexp.engine.kernels.gated_silu import silu


@dataclass(frozen=True)
class LinearTile:
    """How a product is cut: rows of the weight and columns of it in a tile, parts that the columns are split into."""

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


@triton.jit
def _multiply(
    x,
    weight,
    n,
    n_inside,
    row,
    row_inside,
    first_k,
    K: tl.constexpr,
    K_EACH: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Products [n, row] of rows of the weight and rows of x over K_EACH columns; waits for x, and lets go once read.

    HAS_EDGE: some of those columns may lie beyond K.
    """
    weight_rows = weight + n[:, None].to(tl.int64) * K
    wait_for_predecessor(DEPENDENT)
    x_rows = x + row[None, :].to(tl.int64) * K
    acc = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
    for start in tl.range(0, K_EACH, BLOCK_K, num_stages=STAGES):
        k = first_k + start + tl.arange(0, BLOCK_K)
        if HAS_EDGE:
            w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None] & (k < K)[None, :], other=0.0)
            v = tl.load(x_rows + k[:, None], mask=row_inside[None, :] & (k < K)[:, None], other=0.0)
        else:
            w = tl.load(weight_rows + k[None, :], mask=n_inside[:, None], other=0.0)
            v = tl.load(x_rows + k[:, None], mask=row_inside[None, :], other=0.0)
        acc = tl.dot(w, v, acc, input_precision="ieee" if EXACT else "tf32")
    release_successor(DEPENDENT)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
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
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n_inside, row_inside = n < N, row < num_rows
    # Not by tl.cdiv, whose result is no constant to Triton 3.6.
    K_EACH: tl.constexpr = ((K + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    HAS_EDGE: tl.constexpr = K % (BLOCK_K * SPLITS) != 0
    acc = _multiply(
        x,
        weight,
        n,
        n_inside,
        row,
        row_inside,
        split * K_EACH,
        K,
        K_EACH,
        HAS_EDGE,
        BLOCK_K,
        STAGES,
        EXACT,
        DEPENDENT,
    )
    if HAS_BIAS:
        # Once: with the first part.
        added = tl.load(bias + n, mask=n_inside & (split == 0), other=0.0)
        acc += added.to(tl.float32)[:, None]
    place = (split * num_rows + row[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=n_inside[:, None] & row_inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
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
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # One tile of weights holds BLOCK_N rows of gate and the same rows of up.
    both = tl.arange(0, 2 * BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + both % BLOCK_N
    n = tl.where(both < BLOCK_N, column, N + column)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside = row < num_rows
    K_EACH: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    acc = _multiply(
        x,
        weight,
        n,
        column < N,
        row,
        row_inside,
        0,
        K,
        K_EACH,
        K % BLOCK_K != 0,
        BLOCK_K,
        STAGES,
        EXACT,
        DEPENDENT,
    )
    gate, up = tl.split(acc.reshape(2, BLOCK_N, BLOCK_ROWS).permute(1, 2, 0))
    # Rounded where the model's own code rounds: after each product, after the activation, after their product.
    dtype = out.dtype.element_ty
    product = silu(gate.to(dtype).to(tl.float32), dtype) * up.to(dtype).to(tl.float32)
    n_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = row[None, :].to(tl.int64) * N + n_out[:, None]
    tl.store(out + place, product.to(dtype), mask=(n_out < N)[:, None] & row_inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
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
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n_inside, row_inside = n < N, row < num_rows
    K_EACH: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    acc = _multiply(
        x,
        weight,
        n,
        n_inside,
        row,
        row_inside,
        0,
        K,
        K_EACH,
        K % BLOCK_K != 0,
        BLOCK_K,
        STAGES,
        EXACT,
        DEPENDENT,
    )
    # The model's logits have the model's dtype: rounding first keeps its ties, of which the lowest id wins.
    logits = acc.to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where(n_inside[:, None], logits, float("-inf"))
    best, index = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(tile_values + place, best, mask=row_inside)
    # Among NaNs, padding may be what is found, and the next step would read an embedding that is not there.
    tl.store(tile_ids + place, tl.minimum(tile * BLOCK_N + index, N - 1), mask=row_inside)


def block_rows(num_rows: int) -> int:
    """Rows of the batch in one tile: the next power of two, from the tensor cores' 16 up to 256."""
    rows: int = triton.next_power_of_2(num_rows)
    return min(256, max(16, rows))


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile) -> Tensor:
    """Return `x @ weight.T + bias` as float32 parts [splits, rows, out_features], whose sum it is.

    x [rows, in_features] and weight [out_features, in_features] contiguous, of one dtype.
    """
    num_rows, num_columns = x.shape[0], weight.shape[0]
    out = torch.empty((tile.splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    _launch_linear(x, weight, bias, out, tile)
    return out


def _launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: LinearTile) -> None:
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
        EXACT=x.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )


def gate_up_silu(x: Tensor, weight: Tensor, tile: LinearTile) -> Tensor:
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
        EXACT=x.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


def head_maxima(x: Tensor, weight: Tensor, tile: LinearTile) -> tuple[Tensor, Tensor]:
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
        EXACT=x.dtype == torch.float32,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return values, ids
