"""How kernels are cut, by their shapes and by what the device has; figures measured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

# Fewer rows than this a tensor core does not multiply.
MIN_GROUP_ROWS = 16
# A tensor core's product takes no fewer columns; smaller heads are padded.
MIN_BLOCK_DIM = 16


@dataclass(frozen=True)
class DeviceLimits:
    """What a device has: multiprocessors, and the shared memory in bytes that one program may take."""

    num_multiprocessors: int
    max_shared_bytes: int


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceLimits(properties.multi_processor_count, shared_bytes)


# Matrix products

# Rows up to which the products of `linear` are faster than those of the vendor's library.
MAX_SKINNY_ROWS = 64
# Programs per multiprocessor below which the inner dimension is split.
WANTED_PROGRAMS_EACH = 1.2
MAX_LINEAR_SPLITS = 8
# Share of the shared memory that the pipeline's buffers may take; the rest is the compiler's.
LINEAR_SHARE = 0.9
MIN_BLOCK_K = 32
# Of large products: rows and columns of a tile, and columns of the weight per row from which halves pay.
LARGE_TILE = 128
MIN_INNER_PER_ROW = 24


@dataclass(frozen=True)
class LinearTile:
    """How a product is cut: rows of the weight and columns of it in a tile, parts that the columns are split into."""

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


def block_rows(num_rows: int) -> int:
    """Rows of the batch in one tile: the next power of two, from the tensor cores' 16 up to 256."""
    return min(256, max(16, _next_power_of_2(num_rows)))


def choose_split_tile(
    num_rows: int, out_features: Sequence[int], in_features: int, itemsize: int, limits: DeviceLimits
) -> LinearTile:
    """For products of `num_rows` rows with weights side by side, summed up by the kernel that follows."""
    block_n, block_k = 64, 128 if in_features >= 512 else 64
    num_tiles = sum(-(-num_columns // block_n) for num_columns in out_features)
    splits = 1
    while (
        splits < MAX_LINEAR_SPLITS and num_tiles * splits < WANTED_PROGRAMS_EACH * limits.num_multiprocessors
    ):
        splits *= 2
    # Where few programs share the device, each keeps more in flight.
    num_stages = 4 if splits >= 4 else 3
    tile = LinearTile(block_n, block_k, min(splits, max(1, in_features // block_k)), num_stages=num_stages)
    return _fit(tile, block_n, num_rows, itemsize, limits)


def splits_large_product(num_rows: int, weight_shape: torch.Size, limits: DeviceLimits) -> bool:
    """Whether a product of many rows with a weight [out_features, in_features] is faster as a sum of two halves.

    It is when even twice its tiles fit the device at once, and its inner dimension is long against the parts to sum.
    """
    num_columns, num_inner = weight_shape
    num_tiles = -(-num_columns // LARGE_TILE) * -(-num_rows // LARGE_TILE)
    return 2 * num_tiles <= limits.num_multiprocessors and num_inner >= MIN_INNER_PER_ROW * num_rows


def choose_gated_tile(num_rows: int, itemsize: int, limits: DeviceLimits) -> LinearTile:
    """For gate and up, whose activation needs the whole product."""
    tile = LinearTile(32, 128, num_stages=3)
    return _fit(tile, 2 * tile.block_n, num_rows, itemsize, limits)


def choose_head_tile(num_rows: int, itemsize: int, limits: DeviceLimits) -> LinearTile:
    """For the language-model head, of which each tile keeps its maximum alone."""
    tile = LinearTile(64, 128, num_stages=4)
    return _fit(tile, tile.block_n, num_rows, itemsize, limits)


def _fit(
    tile: LinearTile, weight_rows: int, num_rows: int, itemsize: int, limits: DeviceLimits
) -> LinearTile:
    """`tile`, with fewer stages and then a shorter inner block until its buffers fit, or nothing is left to give."""
    column_bytes = (weight_rows + block_rows(num_rows)) * itemsize
    stages, block_k = tile.num_stages, tile.block_k
    while column_bytes * block_k * stages > LINEAR_SHARE * limits.max_shared_bytes:
        if stages > 2:
            stages -= 1
        elif block_k > MIN_BLOCK_K:
            block_k //= 2
        else:
            break
    return replace(tile, block_k=block_k, num_stages=stages)


# Sampling

# Columns of the logits in one tile, of which the first random number chooses one and the second a token in it.
SAMPLING_TILE = 128
# The lowest logit that may be chosen: minus infinity never is.
LOWEST_LOGIT = -3.4028234663852886e38
# Smaller temperatures than this are this: its inverse and the products with it stay finite.
MIN_TEMPERATURE = 1e-30

# Attention

# Programs per multiprocessor that should fit at once, and below which rows are split.
RESIDENT_PROGRAMS = 3
WANTED_PROGRAMS = 2
# A split of fewer tokens costs more in combining than it saves.
MIN_SPLIT_TOKENS = 256
MAX_ATTENTION_SPLITS = 64
# Programs of the fused attention per multiprocessor from which they are made small, and how many should fit at most.
MANY_PROGRAMS_EACH = 12
ROTATED_RESIDENT_PROGRAMS = 4
# Tokens of a row from which its programs are more than one: at least; for each program that there is anyway; and for
# each while those are few, up to so many tokens that one long row among short ones is still cut.
MIN_CHUNK = 256
CHUNK_PER_PROGRAM = 4
CHUNK_PER_PROGRAM_OF_FEW = 16
MAX_CHUNK_OF_FEW = 2048
# Programs per multiprocessor that rows as long as they may become would have; those of shorter ones end at once.
MAX_CHUNKS_EACH = 16


@dataclass(frozen=True)
class AttentionTile:
    """The main loop of a program: tokens an iteration, warps, and stages of its pipeline (one less are in flight)."""

    num_tokens: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, group_rows: int, block_dim: int, itemsize: int) -> int:
        """Shared memory of the keys and values in flight, the queries, and the weights of one iteration."""
        in_flight = 2 * (self.num_stages - 1) * self.num_tokens * block_dim
        return (in_flight + group_rows * (block_dim + self.num_tokens)) * itemsize


# From the fastest on large devices to the smallest. Two stages overlap nothing and still are right.
TILES = (
    AttentionTile(64, 4, 4),
    AttentionTile(64, 4, 3),
    AttentionTile(32, 4, 3),
    AttentionTile(32, 4, 2),
    AttentionTile(16, 4, 2),
)
NARROW_TILES = tuple(AttentionTile(16, 1, stages) for stages in (6, 4, 3, 2))
WIDE_TILES = (
    AttentionTile(64, 4, 3),
    AttentionTile(32, 2, 4),
    AttentionTile(32, 2, 3),
    AttentionTile(32, 2, 2),
    AttentionTile(16, 1, 2),
)


def choose_attention_tile(
    group_rows: int,
    block_dim: int,
    itemsize: int,
    limits: DeviceLimits,
    num_resident: int = RESIDENT_PROGRAMS,
    tiles: tuple[AttentionTile, ...] = TILES,
) -> AttentionTile:
    """Return the first of `tiles` of which `num_resident` programs fit, or the last; sizes in elements and bytes."""
    budget = limits.max_shared_bytes // num_resident
    fitting = (tile for tile in tiles if tile.shared_bytes(group_rows, block_dim, itemsize) <= budget)
    return next(fitting, tiles[-1])


def choose_num_splits(num_programs: int, num_slots: int, limits: DeviceLimits) -> int:
    """Return how many programs share the tokens of one row and key-value head.

    `num_programs`: rows times key-value heads. `num_slots`: the most tokens that a row can store, since its length is
    known on the device alone.
    """
    by_device = WANTED_PROGRAMS * limits.num_multiprocessors // num_programs
    return max(1, min(by_device, num_slots // MIN_SPLIT_TOKENS, MAX_ATTENTION_SPLITS))


def choose_rotated_attention_tile(
    num_programs: int, head_dim: int, itemsize: int, limits: DeviceLimits
) -> AttentionTile:
    """For the fused attention: many programs that hide each other's beginnings, or few that load far ahead."""
    num_each = -(-num_programs // limits.num_multiprocessors)
    tiles = NARROW_TILES if num_each >= MANY_PROGRAMS_EACH else WIDE_TILES
    num_resident = min(ROTATED_RESIDENT_PROGRAMS, num_each)
    return choose_attention_tile(MIN_GROUP_ROWS, head_dim, itemsize, limits, num_resident, tiles)


def choose_attention_chunk(num_programs: int, num_slots: int, limits: DeviceLimits) -> int:
    """Tokens of a row that one program of the fused attention reads, a power of two.

    `num_programs`: rows times key heads. `num_slots`: the most tokens that a row can store. The fewer the programs, the
    more of them a row gets; of many, the long rows alone get several, so that none is left over at the end.
    """
    by_device = -(-num_programs * num_slots // (MAX_CHUNKS_EACH * limits.num_multiprocessors))
    for_few = min(CHUNK_PER_PROGRAM_OF_FEW * num_programs, MAX_CHUNK_OF_FEW)
    return _next_power_of_2(max(MIN_CHUNK, for_few, CHUNK_PER_PROGRAM * num_programs, by_device))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
