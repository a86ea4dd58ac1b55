"""Matrix products of a decode step: few rows against many weights, so that the weights are read at memory speed.

The rows of a weight are the long side of each tile, the batch is the short one. A kernel takes one pointer a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor
from cbexp.engine.kernels.tiles import LinearTile, block_rows

# Weights that one launch of `split_linear` takes.
MAX_WEIGHTS = 3


@triton.jit
def _multiply(
    x,
    weight_rows,
    n_inside,
    row,
    row_inside,
    split,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Products [n, row] of weight rows (pointers [n, 1]) and rows of x over one of SPLITS parts of their columns.

    Waits for x, and lets go once it is read.
    """
    # Not by tl.cdiv, whose result is no constant to Triton 3.6.
    K_EACH: tl.constexpr = ((K + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    wait_for_predecessor(DEPENDENT)
    x_rows = x + row[None, :].to(tl.int64) * K
    acc = tl.zeros([n_inside.shape[0], row.shape[0]], tl.float32)
    for start in tl.range(0, K_EACH, BLOCK_K, num_stages=STAGES):
        k = split * K_EACH + start + tl.arange(0, BLOCK_K)
        if K % (BLOCK_K * SPLITS) != 0:  # some columns may lie beyond K
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
    weight_0,
    weight_1,
    weight_2,
    bias_0,
    bias_1,
    bias_2,
    out_0,
    out_1,
    out_2,
    num_rows,
    N_0: tl.constexpr,
    N_1: tl.constexpr,
    N_2: tl.constexpr,
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
    tile, split = tl.program_id(0), tl.program_id(1)
    # Each weight has tiles of its own, the second's after the first's; N_1 and N_2 may be 0.
    FIRST_1: tl.constexpr = (N_0 + BLOCK_N - 1) // BLOCK_N
    FIRST_2: tl.constexpr = FIRST_1 + (N_1 + BLOCK_N - 1) // BLOCK_N
    weight, bias, out, N, first = weight_0, bias_0, out_0, N_0, 0
    if N_1 > 0:
        is_second = tile >= FIRST_1
        weight, bias = tl.where(is_second, weight_1, weight), tl.where(is_second, bias_1, bias)
        out = tl.where(is_second, out_1, out)
        N, first = tl.where(is_second, N_1, N), tl.where(is_second, FIRST_1, first)
    if N_2 > 0:
        is_third = tile >= FIRST_2
        weight, bias = tl.where(is_third, weight_2, weight), tl.where(is_third, bias_2, bias)
        out = tl.where(is_third, out_2, out)
        N, first = tl.where(is_third, N_2, N), tl.where(is_third, FIRST_2, first)
    n = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n_inside, row_inside = n < N, row < num_rows
    weight_rows = weight + n[:, None].to(tl.int64) * K
    acc = _multiply(
        x, weight_rows, n_inside, row, row_inside, split, K, BLOCK_K, SPLITS, STAGES, EXACT, DEPENDENT
    )
    if HAS_BIAS:
        # Once: with the first part.
        added = tl.load(bias + n, mask=n_inside & (split == 0), other=0.0)
        acc += added.to(tl.float32)[:, None]
    place = (split * num_rows + row[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=n_inside[:, None] & row_inside[None, :])


@triton.jit
def _silu(gate, dtype: tl.constexpr):
    """SiLU in float32, rounded to `dtype`."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    x,
    gate_weight,
    up_weight,
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
    place = column[:, None].to(tl.int64) * K
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside = row < num_rows
    weight_rows = tl.where(both[:, None] < BLOCK_N, gate_weight + place, up_weight + place)
    acc = _multiply(x, weight_rows, column < N, row, row_inside, 0, K, BLOCK_K, 1, STAGES, EXACT, DEPENDENT)
    gate, up = tl.split(acc.reshape(2, BLOCK_N, BLOCK_ROWS).permute(1, 2, 0))
    # Rounded where the model's own code rounds: after each product, after the activation, after their product.
    dtype = out.dtype.element_ty
    product = _silu(gate.to(dtype).to(tl.float32), dtype) * up.to(dtype).to(tl.float32)
    n_out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place_out = row[None, :].to(tl.int64) * N + n_out[:, None]
    tl.store(out + place_out, product.to(dtype), mask=(n_out < N)[:, None] & row_inside[None, :])


@triton.jit
def _silu_product_kernel(gate, up, out, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    place = tl.program_id(0).to(tl.int64) * N + column
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    gates = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (_silu(gates, dtype) * ups).to(dtype), mask=inside)


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
    weight_rows = weight + n[:, None].to(tl.int64) * K
    acc = _multiply(x, weight_rows, n_inside, row, row_inside, 0, K, BLOCK_K, 1, STAGES, EXACT, DEPENDENT)
    # The model's logits have the model's dtype: rounding first keeps its ties, of which the lowest id wins.
    logits = acc.to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))  # a comparison would lose a NaN
    logits = tl.where(n_inside[:, None], logits, float("-inf"))
    best, index = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(tile_values + place, best, mask=row_inside)
    # Among NaNs, padding may be what is found, and the next step would read an embedding that is not there.
    tl.store(tile_ids + place, tl.minimum(tile * BLOCK_N + index, N - 1), mask=row_inside)


def split_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    tile: LinearTile,
    out_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return `x @ weight.T + bias` for each weight, as parts [splits, rows, out_features] whose sum it is.

    x [rows, in_features] and up to three weights [out_features, in_features] contiguous, of one dtype; as many biases
    [out_features], or none.
    """
    num_rows, rows = x.shape[0], block_rows(x.shape[0])
    sizes = [weight.shape[0] for weight in weights]
    outs = [torch.empty((tile.splits, num_rows, n), dtype=out_dtype, device=x.device) for n in sizes]
    grid = (
        sum(triton.cdiv(n, tile.block_n) for n in sizes),
        tile.splits,
        triton.cdiv(num_rows, rows),
    )
    num_absent = MAX_WEIGHTS - len(weights)
    _linear_kernel[grid](
        x,
        *weights,
        *[x] * num_absent,
        *(biases or weights),
        *[x] * num_absent,
        *outs,
        *[outs[0]] * num_absent,
        num_rows,
        *sizes,
        *[0] * num_absent,
        K=x.shape[1],
        HAS_BIAS=len(biases) > 0,
        SPLITS=tile.splits,
        **_options(x, tile, rows),
    )
    return outs


def gate_up_silu(x: Tensor, gate: Tensor, up: Tensor, tile: LinearTile) -> Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)` [rows, n] of two weights [n, in_features]."""
    num_rows, rows, num_columns = x.shape[0], block_rows(x.shape[0]), gate.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(num_columns, tile.block_n), triton.cdiv(num_rows, rows))](
        x, gate, up, out, num_rows, N=num_columns, K=x.shape[1], **_options(x, tile, rows)
    )
    return out


def head_maxima(x: Tensor, weight: Tensor, tile: LinearTile) -> tuple[Tensor, Tensor]:
    """Return the largest logit (float32) and its id (int32) in each tile of the vocabulary, both [rows, tiles]."""
    num_rows, rows, num_columns = x.shape[0], block_rows(x.shape[0]), weight.shape[0]
    num_tiles = triton.cdiv(num_columns, tile.block_n)
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
        K=x.shape[1],
        **_options(x, tile, rows),
    )
    return values, ids


def _options(x: Tensor, tile: LinearTile, rows: int) -> dict[str, object]:
    """What every product is launched with; `rows` of the batch in a tile."""
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_ROWS": rows,
        "STAGES": tile.num_stages,
        "EXACT": x.dtype == torch.float32,
        "num_warps": tile.num_warps,
    } | launch_options(x.device)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, all contiguous [rows, n]."""
    num_rows, num_columns = gate.shape
    out = torch.empty_like(gate)
    block = min(2048, triton.next_power_of_2(num_columns))
    _silu_product_kernel[(num_rows, triton.cdiv(num_columns, block))](
        gate, up, out, N=num_columns, BLOCK=block, num_warps=4, **launch_options(gate.device)
    )
    return out
