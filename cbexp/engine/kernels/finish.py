"""Ends a decode step on the device: the best token of each row, its logit, and what `sampling.advance` does then."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.buffers import NOT_FINITE, DecodeBuffers, SamplingColumn
from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor


@triton.jit
def _best_token_kernel(
    tile_values, tile_ids, next_ids, best_logits, num_tiles, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    values = tl.load(tile_values + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    # Tiles are in the order of their ids, so the leftmost of equals is the lowest id.
    _, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # Among NaNs the place found may be padding: take the last tile, with its own value.
    place = row * num_tiles + tl.minimum(index, num_tiles - 1)
    tl.store(next_ids + row, tl.load(tile_ids + place).to(tl.int64))
    tl.store(best_logits + row, tl.load(tile_values + place))


@triton.jit
def _tile_maxima_kernel(
    logits, tile_values, tile_ids, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    values = tl.load(logits + row * N + column, mask=column < N, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))  # a comparison would lose a NaN
    best, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + tile
    tl.store(tile_values + place, best)
    tl.store(tile_ids + place, tl.minimum(tile * BLOCK + index, N - 1))


@triton.jit
def _advance_kernel(
    next_ids,
    next_logits,
    token_ids,
    positions,
    remaining,
    eos_ids,
    outputs,
    best_logits,
    step,
    num_rows,
    output_stride,
    NUM_EOS: tl.constexpr,
    MARK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    token = tl.load(next_ids + row, mask=inside, other=0)
    logit = tl.load(next_logits + row, mask=inside, other=0.0)
    position = tl.load(positions + row, mask=inside, other=-1)
    left = tl.load(remaining + row, mask=inside, other=0)
    line = tl.load(step)
    active = position >= 0
    left = tl.where(active, left - 1, left)
    ends = left <= 0
    for i in tl.static_range(NUM_EOS):
        ends = ends | (token == tl.load(eos_ids + i))
    # A NaN is no less than infinity.
    finite = tl.abs(logit) < float("inf")
    goes_on = active & finite & (ends == 0)
    made = tl.where(finite, token, MARK)
    tl.store(
        outputs + line.to(tl.int64) * output_stride + row,
        tl.where(active, made, -1).to(tl.int32),
        mask=inside,
    )
    tl.store(best_logits + row, logit, mask=inside)
    tl.store(remaining + row, left, mask=inside)
    tl.store(positions + row, tl.where(goes_on, position + 1, -1), mask=inside)
    tl.store(token_ids + row, token, mask=inside & goes_on)
    tl.store(step, line + 1)


@triton.jit
def _advance_sampled_kernel(
    next_ids,
    next_logits,
    next_logprobs,
    token_ids,
    positions,
    remaining,
    settings,
    seen,
    token_sets,
    outputs,
    best_logits,
    logprobs,
    step,
    num_rows,
    output_stride,
    logprob_stride,
    set_width,
    NUM_COLUMNS: tl.constexpr,
    PENALTY: tl.constexpr,
    FIRST_STOP: tl.constexpr,
    STOP_SET: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    token = tl.load(next_ids + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=-1)
    left = tl.load(remaining + row, mask=inside, other=0)
    line = tl.load(step).to(tl.int64)
    own = settings + row * NUM_COLUMNS
    active, found = position >= 0, token >= 0
    known = tl.where(found, token, 0)
    word, bit = known // 32, (known % 32).to(tl.int32)
    stop_set = tl.load(own + STOP_SET, mask=inside, other=0).to(tl.int64)
    stops = tl.load(token_sets + stop_set * set_width + word, mask=inside, other=0)
    may_stop = position + 1 >= tl.load(own + FIRST_STOP, mask=inside, other=0)
    left = tl.where(active, left - 1, left)
    ends = (left <= 0) | (may_stop & (((stops >> bit) & 1) != 0))
    goes_on = active & found & (ends == 0)
    # Tokens that the row has, where its penalty needs them.
    penalty = tl.load(own + PENALTY, mask=inside, other=0).to(tl.float32, bitcast=True)
    is_noted = inside & active & found & (penalty != 1.0)
    place = seen + row.to(tl.int64) * set_width + word
    tl.store(place, tl.load(place, mask=is_noted, other=0) | (1 << bit), mask=is_noted)
    tl.store(outputs + line * output_stride + row, tl.where(active, token, -1).to(tl.int32), mask=inside)
    tl.store(best_logits + row, tl.load(next_logits + row, mask=inside, other=0.0), mask=inside)
    for i in tl.static_range(4):
        value = tl.load(next_logprobs + row * 4 + i, mask=inside, other=0.0)
        tl.store(logprobs + line * logprob_stride + row * 4 + i, value, mask=inside)
    tl.store(remaining + row, left, mask=inside)
    tl.store(positions + row, tl.where(goes_on, position + 1, -1), mask=inside)
    tl.store(token_ids + row, token, mask=inside & goes_on)
    tl.store(step, (line + 1).to(tl.int32))


def best_token(tile_values: Tensor, tile_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id [rows] (int64) of the largest of `tile_values` [rows, tiles], and that value [rows] (float32).

    Of equals the lowest id; of a row with NaNs among its values any of its ids, with the value that goes with it.
    """
    num_rows, num_tiles = tile_values.shape
    next_ids = torch.empty((num_rows,), dtype=torch.int64, device=tile_values.device)
    best_logits = torch.empty((num_rows,), dtype=torch.float32, device=tile_values.device)
    block = triton.next_power_of_2(num_tiles)
    _best_token_kernel[(num_rows,)](
        tile_values,
        tile_ids,
        next_ids,
        best_logits,
        num_tiles,
        BLOCK=block,
        num_warps=4,
        **launch_options(tile_values.device),
    )
    return next_ids, best_logits


def largest_logit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id [rows] (int64) of the largest of `logits` [rows, vocabulary], and that logit [rows] (float32).

    Of equals the lowest id. A NaN counts as infinity.
    """
    num_rows, num_columns = logits.shape
    block = min(4096, triton.next_power_of_2(num_columns))
    num_tiles = triton.cdiv(num_columns, block)
    values = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    _tile_maxima_kernel[(num_rows, num_tiles)](
        logits, values, ids, N=num_columns, BLOCK=block, num_warps=4, **launch_options(logits.device)
    )
    return best_token(values, ids)


def advance(
    buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor, logprobs: Tensor | None = None
) -> None:
    """As `sampling.advance`, in one program."""
    num_rows = next_ids.shape[0]
    options = {
        "BLOCK": max(32, triton.next_power_of_2(num_rows)),
        "num_warps": 1,  # of several, one could move `step` on before another has read it
    } | launch_options(next_ids.device)
    sampling = buffers.sampling
    if sampling is not None and logprobs is not None:
        _advance_sampled_kernel[(1,)](
            next_ids,
            best_logits,
            logprobs,
            buffers.token_ids,
            buffers.positions,
            buffers.remaining,
            sampling.settings,
            sampling.seen,
            sampling.token_sets,
            buffers.outputs,
            buffers.best_logits,
            sampling.logprobs,
            buffers.step,
            num_rows,
            buffers.outputs.stride(0),
            sampling.logprobs.stride(0),
            sampling.token_sets.shape[1],
            NUM_COLUMNS=len(SamplingColumn),
            PENALTY=int(SamplingColumn.REPETITION_PENALTY),
            FIRST_STOP=int(SamplingColumn.FIRST_STOP),
            STOP_SET=int(SamplingColumn.STOP_SET),
            **options,
        )
        return
    _advance_kernel[(1,)](
        next_ids,
        best_logits,
        buffers.token_ids,
        buffers.positions,
        buffers.remaining,
        buffers.eos_ids,
        buffers.outputs,
        buffers.best_logits,
        buffers.step,
        num_rows,
        buffers.outputs.stride(0),
        NUM_EOS=buffers.eos_ids.shape[0],
        MARK=NOT_FINITE,
        **options,
    )
