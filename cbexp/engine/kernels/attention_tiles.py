"""Chooses how paged decode attention is cut, by shapes and by what the device has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Fewer rows than this a tensor core does not multiply.
MIN_GROUP_ROWS = 16
# A tensor core's product takes no fewer columns; smaller heads are padded.
MIN_BLOCK_DIM = 16
# Programs per multiprocessor that should fit at once, and below which rows are split.
RESIDENT_PROGRAMS = 3
WANTED_PROGRAMS = 2
# A split of fewer tokens costs more in combining than it saves.
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


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


@dataclass(frozen=True)
class DeviceLimits:
    """What a device has: multiprocessors, and the shared memory in bytes that one program may take."""

    num_multiprocessors: int
    max_shared_bytes: int


# From the fastest on large devices to the smallest. Two stages overlap nothing and still are right.
TILES = (
    AttentionTile(64, 4, 4),
    AttentionTile(64, 4, 3),
    AttentionTile(32, 4, 3),
    AttentionTile(32, 4, 2),
    AttentionTile(16, 4, 2),
)


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceLimits(properties.multi_processor_count, shared_bytes)


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
    return max(1, min(by_device, num_slots // MIN_SPLIT_TOKENS, MAX_SPLITS))
