"""Draws the next token of each row from its logits, with log-probabilities, as `sampling.sample_plainly` defines it.

Two kernels: one reads the logits once and sums up each tile; one program a row then chooses a tile, and a token in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from cbexp.engine.buffers import NOT_FINITE, SamplingColumn
from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor
from cbexp.engine.kernels.tiles import SAMPLING_TILE

# Tiles that a program of the first kernel reads, and that a program of the second one reads at a time.
TILES_EACH = 32
TILES_AT_ONCE = 8
# Thresholds that one pass over a row tries, a power of two.
NUM_TRIED = 16
LOWEST = tl.constexpr(float(torch.finfo(torch.float32).min))
MIN_TEMPERATURE = tl.constexpr(1e-30)
TILE = tl.constexpr(SAMPLING_TILE)
MARK = tl.constexpr(NOT_FINITE)
NUM_COLUMNS = tl.constexpr(len(SamplingColumn))
TEMPERATURE = tl.constexpr(int(SamplingColumn.TEMPERATURE))
TOP_K = tl.constexpr(int(SamplingColumn.TOP_K))
TOP_P = tl.constexpr(int(SamplingColumn.TOP_P))
MIN_P = tl.constexpr(int(SamplingColumn.MIN_P))
PENALTY = tl.constexpr(int(SamplingColumn.REPETITION_PENALTY))
FIRST_STOP = tl.constexpr(int(SamplingColumn.FIRST_STOP))
STOP_SET = tl.constexpr(int(SamplingColumn.STOP_SET))
SUPPRESSED_SET = tl.constexpr(int(SamplingColumn.SUPPRESSED_SET))
SUBMISSION = tl.constexpr(int(SamplingColumn.SUBMISSION))
PROMPT = tl.constexpr(int(SamplingColumn.PROMPT))
GENERATION = tl.constexpr(int(SamplingColumn.GENERATION))


@triton.jit
def _read_float(settings, column):
    return tl.load(settings + column).to(tl.float32, bitcast=True)


@triton.jit
def _is_in(words, column, inside):
    """Whether ids are in a set of bits."""
    return ((tl.load(words + column // 32, mask=inside, other=0) >> (column % 32)) & 1) != 0


@triton.jit
def _process(raw, column, inside, settings, seen, token_sets, position, set_width):
    """Logits after penalty and suppression, minus infinity outside; each part runs where the row has it."""
    values = tl.where(inside, raw, float("-inf"))
    penalty = _read_float(settings, PENALTY)
    if penalty != 1.0:
        penalised = tl.where(values > 0, values / penalty, values * penalty)
        values = tl.where(_is_in(seen, column, inside), penalised, values)
    suppressed = tl.load(settings + SUPPRESSED_SET)
    if suppressed != 0:
        banned = _is_in(token_sets + suppressed.to(tl.int64) * set_width, column, inside)
        values = tl.where(banned, float("-inf"), values)
    stops = tl.load(settings + STOP_SET)
    if (position < tl.load(settings + FIRST_STOP)) & (stops != 0):
        banned = _is_in(token_sets + stops.to(tl.int64) * set_width, column, inside)
        values = tl.where(banned, float("-inf"), values)
    return values


@triton.jit
def _is_processed(settings, position):
    """Whether the row's logits are others than the model's."""
    is_early = (position < tl.load(settings + FIRST_STOP)) & (tl.load(settings + STOP_SET) != 0)
    return (_read_float(settings, PENALTY) != 1.0) | (tl.load(settings + SUPPRESSED_SET) != 0) | is_early


@triton.jit
def _read_scale(settings):
    temperature = _read_float(settings, TEMPERATURE)
    return tl.where(temperature <= 0, 1.0, tl.maximum(temperature, MIN_TEMPERATURE))


@triton.jit
def _sum_tiles_kernel(
    logits,
    settings,
    positions,
    seen,
    token_sets,
    tile_maxima,
    tile_masses,
    raw_sums,
    row_stride,
    set_width,
    num_tiles,
    N: tl.constexpr,
    TILES_EACH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile = part * TILES_EACH + tl.arange(0, TILES_EACH)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = column < N
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    position = tl.load(positions + row) + 1
    if position > 0:
        own = settings + row * NUM_COLUMNS
        scale = _read_scale(own)
        raw = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        values = _process(raw, column, inside, own, seen + row * set_width, token_sets, position, set_width)
        maxima = tl.max(values, axis=1)
        masses = tl.sum(tl.exp((values - tl.maximum(maxima, LOWEST)[:, None]) / scale), axis=1)
        place = row * num_tiles + tile
        tl.store(tile_maxima + place, maxima, mask=tile < num_tiles)
        tl.store(tile_masses + place, masses, mask=tile < num_tiles)
        # Of the model's own logits: the largest, and the sums at the row's temperature and at 1.
        largest = tl.maximum(tl.max(tl.max(raw, axis=1), axis=0), LOWEST)
        if _is_processed(own, position):
            at_scale = tl.sum(tl.sum(tl.exp((raw - largest) / scale), axis=1), axis=0)
        else:
            at_scale = tl.sum(masses * tl.exp((tl.maximum(maxima, LOWEST) - largest) / scale), axis=0)
        at_one = at_scale
        if scale != 1.0:
            at_one = tl.sum(tl.sum(tl.exp(raw - largest), axis=1), axis=0)
        # Neither NaN nor plus infinity is less than infinity.
        num_bad = tl.sum(tl.sum((inside & ((raw < float("inf")) == 0)).to(tl.int32), axis=1), axis=0)
        largest = tl.where(num_bad > 0, float("inf"), largest)
        out = raw_sums + (row * tl.num_programs(1) + part) * 3
        tl.store(out, largest)
        tl.store(out + 1, at_scale)
        tl.store(out + 2, at_one)


@triton.jit
def _order_of(number):
    """Integers in the order of float32 numbers, without gaps."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _number_at(order):
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest(values, k, low, high):
    """The largest number, of an order from `low` to below `high`, that at least k of `values` reach."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((values >= _number_at(middle)).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _read_listed(
    start,
    num_listed,
    listed,
    logits,
    own,
    seen,
    token_sets,
    position,
    set_width,
    N: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
):
    """Raw and processed logits [TILES_AT_ONCE, TILE] of tiles in a list; minus infinity beyond its end."""
    index = start + tl.arange(0, TILES_AT_ONCE)
    tile = tl.load(listed + index, mask=index < num_listed, other=0)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (index < num_listed)[:, None] & (column < N)
    raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return raw, _process(raw, column, inside, own, seen, token_sets, position, set_width)


@triton.jit
def _find_threshold(
    least,
    wanted,
    by_mass,
    low,
    high,
    largest,
    scale,
    num_listed,
    listed,
    logits,
    own,
    seen,
    token_sets,
    position,
    set_width,
    N: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    NUM_TRIED: tl.constexpr,
):
    """The largest number, as its order, such that what reaches it has the weight `wanted`: tokens, or their mass.

    What is less than `least` has no weight. Each pass over the listed tiles tries several numbers.
    """
    tried = tl.arange(0, NUM_TRIED).to(tl.int64)
    while high - low > 1:
        orders = low + (high - low) * (tried + 1) // NUM_TRIED
        numbers = _number_at(tl.minimum(orders, high - 1))
        weights = tl.zeros([NUM_TRIED], tl.float32)
        for start in range(0, num_listed, TILES_AT_ONCE):
            _, values = _read_listed(
                start,
                num_listed,
                listed,
                logits,
                own,
                seen,
                token_sets,
                position,
                set_width,
                N,
                TILES_AT_ONCE,
            )
            weight = tl.where(by_mass, tl.exp((values - largest) / scale), 1.0)
            weight = tl.where(values >= least, weight, 0.0)
            reach = values[:, :, None] >= numbers[None, None, :]
            weights += tl.sum(tl.sum(tl.where(reach, weight[:, :, None], 0.0), axis=0), axis=0)
        enough = weights >= wanted
        is_new = orders < high
        below = tl.max(tl.where(enough & is_new, orders, low), axis=0)
        high = tl.min(tl.where((enough == 0) & is_new, orders, high), axis=0)
        low = below
    return low


@triton.jit
def _choose_by_mass(masses, index, uniform, LAST: tl.constexpr):
    """The index of one of `masses`, with probability in proportion; never one without mass, whatever is rounded."""
    has_mass = masses > 0
    beyond = has_mass & (tl.cumsum(masses, axis=0) > uniform * tl.sum(masses, axis=0))
    first = tl.min(tl.where(beyond, index, LAST), axis=0)
    last = tl.max(tl.where(has_mass, index, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _choose_kernel(
    logits,
    settings,
    positions,
    seen,
    token_sets,
    key,
    tile_maxima,
    tile_masses,
    raw_sums,
    listed,
    next_ids,
    next_logits,
    logprobs,
    row_stride,
    set_width,
    num_tiles,
    num_parts,
    N: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    NUM_TRIED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    position = tl.load(positions + row) + 1
    token = tl.full((), 0, tl.int64)
    zero = tl.full((), 0.0, tl.float32)
    logit, model, sampled, at_one, kept_mass = zero, zero, zero, zero, zero
    if position > 0:
        logits += row * row_stride
        seen += row * set_width
        listed += row * num_tiles
        tile_maxima += row * num_tiles
        tile_masses += row * num_tiles
        own = settings + row * NUM_COLUMNS
        is_greedy = _read_float(own, TEMPERATURE) <= 0
        scale = _read_scale(own)

        part = tl.arange(0, BLOCK_PARTS)
        place = raw_sums + (row * num_parts + part) * 3
        has_part = part < num_parts
        part_maxima = tl.load(place, mask=has_part, other=LOWEST)
        raw_largest = tl.max(part_maxima, axis=0)
        raw_scale_sums = tl.load(place + 1, mask=has_part, other=0.0)
        raw_one_sums = tl.load(place + 2, mask=has_part, other=0.0)

        tile = tl.arange(0, BLOCK_TILES)
        has_tile = tile < num_tiles
        maxima = tl.load(tile_maxima + tile, mask=has_tile, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        if (raw_largest < float("inf")) & (largest > float("-inf")):
            raw_sum = tl.sum(raw_scale_sums * tl.exp((part_maxima - raw_largest) / scale), axis=0)
            one_sum = tl.sum(raw_one_sums * tl.exp(part_maxima - raw_largest), axis=0)
            masses = tl.load(tile_masses + tile, mask=has_tile, other=0.0)
            masses *= tl.exp((tl.maximum(maxima, LOWEST) - largest) / scale)
            mass_sum = tl.sum(masses, axis=0)

            # The smallest logit that may be chosen.
            threshold = tl.full((), LOWEST, tl.float32)
            kept_raw = raw_sum
            top_k, top_p, min_p = tl.load(own + TOP_K), _read_float(own, TOP_P), _read_float(own, MIN_P)
            has_top_k = (top_k > 0) & (top_k < N)
            is_filtered = (has_top_k | (top_p < 1.0) | (min_p > 0.0)) & (is_greedy == 0)
            if is_filtered:
                least = tl.full((), LOWEST, tl.float32)
                low, high = _order_of(least), _order_of(largest) + 1
                # Tiles that may have something to keep. As many as reach it have a token that does; and what is less
                # likely than this has less than 1 - top_p together.
                if has_top_k:
                    if top_k <= num_tiles:
                        low = _kth_largest(maxima, top_k, low, high)
                else:
                    share = min_p
                    if top_p < 1.0:
                        share = (1.0 - top_p) * mass_sum / N * 0.99
                    bound = tl.minimum(largest + scale * tl.log(tl.maximum(share, 1e-37)), largest)
                    low = tl.maximum(low, tl.minimum(_order_of(bound), high - 1))
                is_listed = has_tile & (maxima >= _number_at(low))
                num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
                tl.store(listed + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, tile, mask=is_listed)
                tl.debug_barrier()

                if has_top_k:
                    low = _find_threshold(
                        least,
                        top_k.to(tl.float32),
                        False,
                        low,
                        high,
                        largest,
                        scale,
                        num_listed,
                        listed,
                        logits,
                        own,
                        seen,
                        token_sets,
                        position,
                        set_width,
                        N,
                        TILES_AT_ONCE,
                        NUM_TRIED,
                    )
                    least = _number_at(low)
                    threshold = least
                if top_p < 1.0:
                    in_top_k = mass_sum
                    if has_top_k:
                        in_top_k = zero
                        for start in range(0, num_listed, TILES_AT_ONCE):
                            _, values = _read_listed(
                                start,
                                num_listed,
                                listed,
                                logits,
                                own,
                                seen,
                                token_sets,
                                position,
                                set_width,
                                N,
                                TILES_AT_ONCE,
                            )
                            kept = tl.where(values >= least, tl.exp((values - largest) / scale), 0.0)
                            in_top_k += tl.sum(tl.sum(kept, axis=1), axis=0)
                    low = _find_threshold(
                        least,
                        tl.maximum(top_p * in_top_k, 1e-37),
                        True,
                        low,
                        high,
                        largest,
                        scale,
                        num_listed,
                        listed,
                        logits,
                        own,
                        seen,
                        token_sets,
                        position,
                        set_width,
                        N,
                        TILES_AT_ONCE,
                        NUM_TRIED,
                    )
                    threshold = tl.maximum(threshold, _number_at(low))
                if min_p > 0.0:
                    in_min_p = tl.minimum(largest + scale * tl.log(min_p), largest)
                    threshold = tl.maximum(threshold, in_min_p)

                # What is kept of each tile takes the place of its mass.
                tl.store(tile_masses + tile, tl.zeros([BLOCK_TILES], tl.float32), mask=has_tile)
                tl.debug_barrier()
                kept_raw = zero
                for start in range(0, num_listed, TILES_AT_ONCE):
                    raw, values = _read_listed(
                        start,
                        num_listed,
                        listed,
                        logits,
                        own,
                        seen,
                        token_sets,
                        position,
                        set_width,
                        N,
                        TILES_AT_ONCE,
                    )
                    is_kept = values >= threshold
                    index = start + tl.arange(0, TILES_AT_ONCE)
                    tile_id = tl.load(listed + index, mask=index < num_listed, other=0)
                    kept = tl.where(is_kept, tl.exp((values - largest) / scale), 0.0)
                    tl.store(tile_masses + tile_id, tl.sum(kept, axis=1), mask=index < num_listed)
                    kept = tl.where(is_kept, tl.exp((raw - raw_largest) / scale), 0.0)
                    kept_raw += tl.sum(tl.sum(kept, axis=1), axis=0)
                tl.debug_barrier()
                masses = tl.load(tile_masses + tile, mask=has_tile, other=0.0)
                mass_sum = tl.sum(masses, axis=0)
            elif _is_processed(own, position):
                # Of the model's own probability, all but what is banned.
                kept_raw = zero
                for start in range(0, N, TILE * TILES_AT_ONCE):
                    column = start + tl.arange(0, TILE * TILES_AT_ONCE)
                    inside = column < N
                    raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
                    values = _process(raw, column, inside, own, seen, token_sets, position, set_width)
                    kept = tl.where(values >= LOWEST, tl.exp((raw - raw_largest) / scale), 0.0)
                    kept_raw += tl.sum(kept, axis=0)

            k0 = tl.load(key).to(tl.uint32, bitcast=True)
            k1 = tl.load(key + 1).to(tl.uint32, bitcast=True)
            first, second, _, _ = philox_impl(
                tl.load(own + SUBMISSION).to(tl.uint32, bitcast=True),
                tl.load(own + PROMPT).to(tl.uint32, bitcast=True),
                tl.load(own + GENERATION).to(tl.uint32, bitcast=True),
                position.to(tl.uint32, bitcast=True),
                k0,
                k1,
                10,
            )
            chosen = _choose_by_mass(
                masses, tile, (first >> 8).to(tl.float32) * 5.9604644775390625e-08, BLOCK_TILES
            )
            if is_greedy:
                chosen = tl.min(tl.where(maxima == largest, tile, BLOCK_TILES), axis=0)
            in_tile = tl.arange(0, TILE)
            column = chosen * TILE + in_tile
            inside = column < N
            raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
            values = _process(raw, column, inside, own, seen, token_sets, position, set_width)
            of_tile = tl.where(values >= threshold, tl.exp((values - largest) / scale), 0.0)
            place_in = _choose_by_mass(
                of_tile, in_tile, (second >> 8).to(tl.float32) * 5.9604644775390625e-08, TILE
            )
            if is_greedy:
                place_in = tl.min(tl.where(values == largest, in_tile, TILE), axis=0)
            token = (chosen * TILE + place_in).to(tl.int64)
            logit = tl.sum(tl.where(in_tile == place_in, raw, 0.0), axis=0)
            value = tl.sum(tl.where(in_tile == place_in, values, 0.0), axis=0)
            at_one = logit - raw_largest - tl.log(one_sum)
            model = (logit - raw_largest) / scale - tl.log(raw_sum)
            sampled = (value - largest) / scale - tl.log(mass_sum)
            kept_mass = kept_raw / raw_sum
            if is_greedy:
                model, sampled, kept_mass = at_one, zero, tl.exp(at_one)
        else:
            token = tl.full((), MARK, tl.int64)
    tl.store(next_ids + row, token)
    tl.store(next_logits + row, logit)
    out = logprobs + row * 4
    tl.store(out, model)
    tl.store(out + 1, sampled)
    tl.store(out + 2, at_one)
    tl.store(out + 3, kept_mass)


def sample(
    logits: Tensor, settings: Tensor, positions: Tensor, seen: Tensor, token_sets: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sampling.sample_plainly`; inactive rows get token 0."""
    num_rows, num_columns = logits.shape
    device, set_width = logits.device, token_sets.shape[1]
    num_tiles = triton.cdiv(num_columns, SAMPLING_TILE)
    num_parts = triton.cdiv(num_tiles, TILES_EACH)
    if logits.stride(1) != 1:
        logits = logits.contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tile_maxima, tile_masses = new(num_rows, num_tiles), new(num_rows, num_tiles)
    raw_sums, listed = new(num_rows, num_parts, 3), new(num_rows, num_tiles, dtype=torch.int32)
    next_ids, next_logits = new(num_rows, dtype=torch.int64), new(num_rows)
    logprobs = new(num_rows, 4)
    rows = logits, settings, positions, seen, token_sets
    options = launch_options(device)
    _sum_tiles_kernel[(num_rows, num_parts)](
        *rows,
        tile_maxima,
        tile_masses,
        raw_sums,
        logits.stride(0),
        set_width,
        num_tiles,
        N=num_columns,
        TILES_EACH=TILES_EACH,
        num_warps=4,
        **options,
    )
    _choose_kernel[(num_rows,)](
        *rows,
        key,
        tile_maxima,
        tile_masses,
        raw_sums,
        listed,
        next_ids,
        next_logits,
        logprobs,
        logits.stride(0),
        set_width,
        num_tiles,
        num_parts,
        N=num_columns,
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        BLOCK_PARTS=triton.next_power_of_2(num_parts),
        TILES_AT_ONCE=TILES_AT_ONCE,
        NUM_TRIED=NUM_TRIED,
        num_warps=8,
        **options,
    )
    return next_ids, next_logits, logprobs
