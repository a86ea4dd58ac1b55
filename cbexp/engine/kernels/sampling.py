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
from cbexp.engine.kernels import tiles
from cbexp.engine.kernels.launch import launch_options, release_successor, wait_for_predecessor

# Tiles that a program of the first kernel reads, and that a program of the second one reads at a time.
TILES_EACH = 32
TILES_AT_ONCE = 16
# Of top-k: as many values are kept at hand for top-p.
MAX_AT_HAND = 1024
# Low bits of a float32 number that one of a narrower type does not have.
IDLE_BITS = {torch.bfloat16: 16, torch.float16: 13}
LOWEST = tl.constexpr(tiles.LOWEST_LOGIT)
MIN_TEMPERATURE = tl.constexpr(tiles.MIN_TEMPERATURE)
TILE = tl.constexpr(tiles.SAMPLING_TILE)
MARK = tl.constexpr(NOT_FINITE)
NUM_SUMS = tl.constexpr(4)
TO_UNIT = tl.constexpr(2.0**-24)
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
def _read_changes(settings, seen, token_sets, position, set_width):
    """What is changed of a row's logits: the penalty and its tokens; the sets of ids that are suppressed, and banned.

    An empty set, the first one, changes nothing.
    """
    stops = tl.load(settings + STOP_SET)
    is_early = position < tl.load(settings + FIRST_STOP)
    suppressed = tl.load(settings + SUPPRESSED_SET).to(tl.int64)
    banned = tl.where(is_early, stops, 0).to(tl.int64)
    return (_read_float(settings, PENALTY), seen, token_sets, suppressed * set_width, banned * set_width)


@triton.jit
def _is_changed(changes):
    penalty, _, _, suppressed, banned = changes
    return (penalty != 1.0) | (suppressed != 0) | (banned != 0)


@triton.jit
def _is_in(words, column, inside):
    """Whether ids are in a set of bits."""
    return ((tl.load(words + column // 32, mask=inside, other=0) >> (column % 32)) & 1) != 0


@triton.jit
def _process(raw, column, inside, changes):
    """Logits after penalty and suppression; each part runs where the row has it."""
    penalty, seen, token_sets, suppressed, banned = changes
    values = raw
    if penalty != 1.0:
        penalised = tl.where(values > 0, values / penalty, values * penalty)
        values = tl.where(_is_in(seen, column, inside), penalised, values)
    if suppressed != 0:
        values = tl.where(_is_in(token_sets + suppressed, column, inside), float("-inf"), values)
    if banned != 0:
        values = tl.where(_is_in(token_sets + banned, column, inside), float("-inf"), values)
    return values


@triton.jit
def _read_scale(settings):
    temperature = _read_float(settings, TEMPERATURE)
    return tl.where(temperature <= 0, 1.0, tl.maximum(temperature, MIN_TEMPERATURE))


@triton.jit
def _sum_all(values):
    return tl.sum(tl.sum(values, axis=1), axis=0)


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
        changes = _read_changes(own, seen + row * set_width, token_sets, position, set_width)
        raw = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        values = _process(raw, column, inside, changes)
        maxima = tl.max(values, axis=1)
        masses = tl.sum(tl.exp((values - tl.maximum(maxima, LOWEST)[:, None]) / scale), axis=1)
        place = row * num_tiles + tile
        tl.store(tile_maxima + place, maxima, mask=tile < num_tiles)
        tl.store(tile_masses + place, masses, mask=tile < num_tiles)
        # Of the model's own logits: the largest; the sums at the row's temperature, of all and of what is not banned,
        # and the sum at a temperature of 1.
        largest = tl.maximum(tl.max(tl.max(raw, axis=1), axis=0), LOWEST)
        at_scale = tl.sum(masses * tl.exp((tl.maximum(maxima, LOWEST) - largest) / scale), axis=0)
        allowed = at_scale
        if _is_changed(changes):
            of_raw = tl.exp((raw - largest) / scale)
            at_scale = _sum_all(of_raw)
            allowed = _sum_all(tl.where(values >= LOWEST, of_raw, 0.0))
        at_one = at_scale
        if scale != 1.0:
            at_one = _sum_all(tl.exp(raw - largest))
        # Neither NaN nor plus infinity is less than infinity.
        num_bad = _sum_all((inside & ((raw < float("inf")) == 0)).to(tl.int32))
        largest = tl.where(num_bad > 0, float("inf"), largest)
        out = raw_sums + (row * tl.num_programs(1) + part) * NUM_SUMS
        tl.store(out, largest)
        tl.store(out + 1, at_scale)
        tl.store(out + 2, allowed)
        tl.store(out + 3, at_one)


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
def _find_in_vector(values, weights, wanted, low, high, shift):
    """The largest number such that `values` from it on have the weight `wanted`, as its order without `shift` bits.

    It is known to be from `low` to below `high`.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(values >= _number_at(middle << shift), weights, 0.0), axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _read_listed(start, num_listed, listed, logits, changes, N: tl.constexpr, TILES_AT_ONCE: tl.constexpr):
    """Raw and processed logits [TILES_AT_ONCE, TILE] of tiles in a list; minus infinity beyond its end."""
    index = start + tl.arange(0, TILES_AT_ONCE)
    tile = tl.load(listed + index, mask=index < num_listed, other=0)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (index < num_listed)[:, None] & (column < N)
    raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return raw, _process(raw, column, inside, changes), tile


@triton.jit
def _find_in_row(
    wanted,
    by_mass,
    low,
    high,
    largest,
    scale,
    num_listed,
    listed,
    logits,
    changes,
    shift,
    N: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
):
    """As `_find_in_vector`, of the listed tiles, where a weight is a token or its mass; each pass tries seven numbers.

    What is below `low` weighs nothing.
    """
    while high - low > 1:
        # Not above the last one that is open.
        o1 = low + ((high - low) * 1 + 7) // 8
        o2 = tl.minimum(low + ((high - low) * 2 + 7) // 8, high - 1)
        o3 = tl.minimum(low + ((high - low) * 3 + 7) // 8, high - 1)
        o4 = tl.minimum(low + ((high - low) * 4 + 7) // 8, high - 1)
        o5 = tl.minimum(low + ((high - low) * 5 + 7) // 8, high - 1)
        o6 = tl.minimum(low + ((high - low) * 6 + 7) // 8, high - 1)
        o7 = tl.minimum(low + ((high - low) * 7 + 7) // 8, high - 1)
        o1 = tl.minimum(o1, high - 1)
        n1, n2, n3 = _number_at(o1 << shift), _number_at(o2 << shift), _number_at(o3 << shift)
        n4, n5, n6 = _number_at(o4 << shift), _number_at(o5 << shift), _number_at(o6 << shift)
        n7 = _number_at(o7 << shift)
        w1 = tl.zeros([TILES_AT_ONCE, TILE], tl.float32)
        w2, w3, w4, w5, w6, w7 = w1, w1, w1, w1, w1, w1
        for start in tl.range(0, num_listed, TILES_AT_ONCE, num_stages=2):
            _, values, _ = _read_listed(start, num_listed, listed, logits, changes, N, TILES_AT_ONCE)
            weight = tl.where(by_mass, tl.exp((values - largest) / scale), 1.0)
            w1 += tl.where(values >= n1, weight, 0.0)
            w2 += tl.where(values >= n2, weight, 0.0)
            w3 += tl.where(values >= n3, weight, 0.0)
            w4 += tl.where(values >= n4, weight, 0.0)
            w5 += tl.where(values >= n5, weight, 0.0)
            w6 += tl.where(values >= n6, weight, 0.0)
            w7 += tl.where(values >= n7, weight, 0.0)
        e1, e2, e3 = _sum_all(w1) >= wanted, _sum_all(w2) >= wanted, _sum_all(w3) >= wanted
        e4, e5, e6 = _sum_all(w4) >= wanted, _sum_all(w5) >= wanted, _sum_all(w6) >= wanted
        e7 = _sum_all(w7) >= wanted
        new_high = tl.where(e1, high, o1)
        new_high = tl.where(e1 & (e2 == 0), o2, new_high)
        new_high = tl.where(e2 & (e3 == 0), o3, new_high)
        new_high = tl.where(e3 & (e4 == 0), o4, new_high)
        new_high = tl.where(e4 & (e5 == 0), o5, new_high)
        new_high = tl.where(e5 & (e6 == 0), o6, new_high)
        new_high = tl.where(e6 & (e7 == 0), o7, new_high)
        low = tl.where(e1, o1, low)
        low = tl.where(e2, o2, low)
        low = tl.where(e3, o3, low)
        low = tl.where(e4, o4, low)
        low = tl.where(e5, o5, low)
        low = tl.where(e6, o6, low)
        low = tl.where(e7, o7, low)
        high = new_high
    return low


@triton.jit
def _find_threshold(
    own,
    maxima,
    largest,
    mass_sum,
    scale,
    listed,
    at_hand,
    logits,
    changes,
    num_tiles,
    shift,
    N: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    MAX_AT_HAND: tl.constexpr,
):
    """The smallest logit that top-k, top-p and min-p leave, and the tiles that may have one, in a list."""
    top_k, top_p, min_p = tl.load(own + TOP_K), _read_float(own, TOP_P), _read_float(own, MIN_P)
    has_top_k = (top_k > 0) & (top_k < N)
    lowest = tl.full((), LOWEST, tl.float32)
    low, high = _order_of(lowest) >> shift, (_order_of(largest) >> shift) + 1
    # As many tiles as reach this have a token that does; and what is less likely than this has less than the rest of
    # top-p together.
    if has_top_k:
        if top_k <= num_tiles:
            low = _find_in_vector(maxima, tl.full([BLOCK_TILES], 1.0, tl.float32), top_k, low, high, shift)
    else:
        share = min_p
        if top_p < 1.0:
            share = (1.0 - top_p) * mass_sum / N * 0.99
        bound = tl.minimum(largest + scale * tl.log(tl.maximum(share, 1e-37)), largest)
        low = tl.maximum(low, _order_of(bound) >> shift)
    tile = tl.arange(0, BLOCK_TILES)
    is_listed = (tile < num_tiles) & (maxima >= _number_at(low << shift))
    num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
    tl.store(listed + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, tile, mask=is_listed)
    tl.debug_barrier()

    threshold, in_top_k, num_kept = lowest, mass_sum, MAX_AT_HAND + 1
    if has_top_k:
        low = _find_in_row(
            top_k,
            False,
            low,
            high,
            largest,
            scale,
            num_listed,
            listed,
            logits,
            changes,
            shift,
            N,
            TILES_AT_ONCE,
        )
        threshold = _number_at(low << shift)
    if top_p < 1.0:
        if has_top_k:
            in_top_k, num_kept = tl.full((), 0.0, tl.float32), 0
            for start in range(0, num_listed, TILES_AT_ONCE):
                _, values, _ = _read_listed(start, num_listed, listed, logits, changes, N, TILES_AT_ONCE)
                is_kept = values >= threshold
                in_top_k += _sum_all(tl.where(is_kept, tl.exp((values - largest) / scale), 0.0))
                flat, is_kept = (
                    tl.reshape(values, [TILES_AT_ONCE * TILE]),
                    tl.reshape(is_kept, [TILES_AT_ONCE * TILE]),
                )
                place = num_kept + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
                tl.store(at_hand + place, flat, mask=is_kept & (place < MAX_AT_HAND))
                num_kept += tl.sum(is_kept.to(tl.int32), axis=0)
            tl.debug_barrier()
        wanted = tl.maximum(top_p * in_top_k, 1e-37)
        if num_kept <= MAX_AT_HAND:
            index = tl.arange(0, MAX_AT_HAND)
            values = tl.load(at_hand + index, mask=index < num_kept, other=float("-inf"))
            low = _find_in_vector(values, tl.exp((values - largest) / scale), wanted, low, high, shift)
        else:
            low = _find_in_row(
                wanted,
                True,
                low,
                high,
                largest,
                scale,
                num_listed,
                listed,
                logits,
                changes,
                shift,
                N,
                TILES_AT_ONCE,
            )
        threshold = tl.maximum(threshold, _number_at(low << shift))
    if min_p > 0.0:
        threshold = tl.maximum(threshold, tl.minimum(largest + scale * tl.log(min_p), largest))
    return threshold, num_listed


@triton.jit
def _choose_by_mass(masses, index, uniform, LAST: tl.constexpr):
    """The index of one of `masses`, with probability in proportion; never one without mass, whatever is rounded."""
    has_mass = masses > 0
    beyond = has_mass & (tl.cumsum(masses, axis=0) > uniform * tl.sum(masses, axis=0))
    first = tl.min(tl.where(beyond, index, LAST), axis=0)
    last = tl.max(tl.where(has_mass, index, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _draw(own, key, position):
    """Two numbers in [0, 1), of 24 bits."""
    first, second, _, _ = philox_impl(
        tl.load(own + SUBMISSION).to(tl.uint32, bitcast=True),
        tl.load(own + PROMPT).to(tl.uint32, bitcast=True),
        tl.load(own + GENERATION).to(tl.uint32, bitcast=True),
        position.to(tl.uint32, bitcast=True),
        tl.load(key).to(tl.uint32, bitcast=True),
        tl.load(key + 1).to(tl.uint32, bitcast=True),
        10,
    )
    return (first >> 8).to(tl.float32) * TO_UNIT, (second >> 8).to(tl.float32) * TO_UNIT


@triton.jit(do_not_specialize=["num_parts"])
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
    at_hand,
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
    MAX_AT_HAND: tl.constexpr,
    IDLE_BITS: tl.constexpr,
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
        tile_masses += row * num_tiles
        own = settings + row * NUM_COLUMNS
        is_greedy = _read_float(own, TEMPERATURE) <= 0
        scale = _read_scale(own)
        changes = _read_changes(own, seen + row * set_width, token_sets, position, set_width)

        part = tl.arange(0, BLOCK_PARTS)
        place, has_part = raw_sums + (row * num_parts + part) * NUM_SUMS, part < num_parts
        part_maxima = tl.load(place, mask=has_part, other=LOWEST)
        raw_largest = tl.max(part_maxima, axis=0)
        tile = tl.arange(0, BLOCK_TILES)
        has_tile = tile < num_tiles
        maxima = tl.load(tile_maxima + row * num_tiles + tile, mask=has_tile, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        if (raw_largest < float("inf")) & (largest > float("-inf")):
            at_scale = tl.exp((part_maxima - raw_largest) / scale)
            raw_sum = tl.sum(tl.load(place + 1, mask=has_part, other=0.0) * at_scale, axis=0)
            kept_raw = tl.sum(tl.load(place + 2, mask=has_part, other=0.0) * at_scale, axis=0)
            of_one = tl.load(place + 3, mask=has_part, other=0.0)
            one_sum = tl.sum(of_one * tl.exp(part_maxima - raw_largest), axis=0)
            masses = tl.load(tile_masses + tile, mask=has_tile, other=0.0)
            masses *= tl.exp((tl.maximum(maxima, LOWEST) - largest) / scale)
            mass_sum = tl.sum(masses, axis=0)
            threshold = tl.full((), LOWEST, tl.float32)
            top_k = tl.load(own + TOP_K)
            is_filtered = ((top_k > 0) & (top_k < N)) | (_read_float(own, TOP_P) < 1.0)
            is_filtered = is_filtered | (_read_float(own, MIN_P) > 0.0)
            if is_filtered & (is_greedy == 0):
                of_row = listed + row * num_tiles
                shift = tl.where(
                    _read_float(own, PENALTY) == 1.0, IDLE_BITS, 0
                )  # what is penalised has all bits
                threshold, num_listed = _find_threshold(
                    own,
                    maxima,
                    largest,
                    mass_sum,
                    scale,
                    of_row,
                    at_hand + row * MAX_AT_HAND,
                    logits,
                    changes,
                    num_tiles,
                    shift,
                    N,
                    BLOCK_TILES,
                    TILES_AT_ONCE,
                    MAX_AT_HAND,
                )
                # What is kept of each tile takes the place of its mass.
                tl.store(tile_masses + tile, tl.zeros([BLOCK_TILES], tl.float32), mask=has_tile)
                tl.debug_barrier()
                kept_of_raw = tl.zeros([TILES_AT_ONCE], tl.float32)
                for start in range(0, num_listed, TILES_AT_ONCE):
                    raw, values, tile_id = _read_listed(
                        start, num_listed, of_row, logits, changes, N, TILES_AT_ONCE
                    )
                    kept = tl.where(values >= threshold, tl.exp((values - largest) / scale), 0.0)
                    is_there = start + tl.arange(0, TILES_AT_ONCE) < num_listed
                    tl.store(tile_masses + tile_id, tl.sum(kept, axis=1), mask=is_there)
                    kept = tl.where(values >= threshold, tl.exp((raw - raw_largest) / scale), 0.0)
                    kept_of_raw += tl.sum(kept, axis=1)
                kept_raw = tl.sum(kept_of_raw, axis=0)
                tl.debug_barrier()
                masses = tl.load(tile_masses + tile, mask=has_tile, other=0.0)
                mass_sum = tl.sum(masses, axis=0)

            for_tile, for_token = _draw(own, key, position)
            chosen = _choose_by_mass(masses, tile, for_tile, BLOCK_TILES)
            if is_greedy:
                chosen = tl.min(tl.where(maxima == largest, tile, BLOCK_TILES), axis=0)
            in_tile = tl.arange(0, TILE)
            column = chosen * TILE + in_tile
            inside = column < N
            raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
            values = _process(raw, column, inside, changes)
            of_tile = tl.where(values >= threshold, tl.exp((values - largest) / scale), 0.0)
            place_in = _choose_by_mass(of_tile, in_tile, for_token, TILE)
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
    num_tiles = triton.cdiv(num_columns, tiles.SAMPLING_TILE)
    num_parts = triton.cdiv(num_tiles, TILES_EACH)
    if logits.stride(1) != 1:
        logits = logits.contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tile_maxima, tile_masses = new(num_rows, num_tiles), new(num_rows, num_tiles)
    raw_sums = new(num_rows, num_parts, NUM_SUMS.value)
    listed, at_hand = new(num_rows, num_tiles, dtype=torch.int32), new(num_rows, MAX_AT_HAND)
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
        at_hand,
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
        MAX_AT_HAND=MAX_AT_HAND,
        IDLE_BITS=IDLE_BITS.get(logits.dtype, 0),
        num_warps=8,
        **options,
    )
    return next_ids, next_logits, logprobs
