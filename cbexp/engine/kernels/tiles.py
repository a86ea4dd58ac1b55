"""Chooses how a matrix product is cut, by its shape and what the device has; figures measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cbexp.engine.kernels.decode_linear import LinearTile, block_rows

# Shared memory that one program may take on the smallest cards served (compute capability 8.6, 8.9, 12.0).
SMALL_SHARED_BYTES = 99 * 1024
# Programs per multiprocessor below which the inner dimension is split.
WANTED_PROGRAMS_EACH = 2.4


@cache
def _device(index: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory a program may have."""
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", SMALL_SHARED_BYTES)
    return properties.multi_processor_count, shared


def fit_tile(tile: LinearTile, rows: int, weight_tiles: int, itemsize: int, shared_bytes: int) -> LinearTile:
    """`tile`, with fewer stages and then a shorter inner block until its buffers fit `shared_bytes`."""
    stages, block_k = tile.num_stages, tile.block_k
    while (weight_tiles * tile.block_n + rows) * block_k * itemsize * stages > shared_bytes * 0.9:
        if stages > 2:
            stages -= 1
        elif block_k > 32:
            block_k //= 2
        else:
            break
    return LinearTile(tile.block_n, block_k, tile.splits, tile.num_warps, stages, tile.prefetch)


def choose_split_tile(x: Tensor, weight: Tensor) -> LinearTile:
    """For products whose parts are summed by the kernel that follows."""
    num_multiprocessors, shared = _device(x.device.index)
    num_columns, num_inner = weight.shape
    num_tiles = -(-num_columns // 64)
    splits = 1
    while splits < 8 and num_tiles * splits < WANTED_PROGRAMS_EACH * num_multiprocessors / 2:
        splits *= 2
    block_k = 128 if num_inner >= 512 else 64
    tile = LinearTile(64, block_k, min(splits, max(1, num_inner // block_k)), 4, 3)
    return fit_tile(tile, block_rows(x.shape[0]), 1, x.itemsize, shared)


def choose_gated_tile(x: Tensor, weight: Tensor) -> LinearTile:
    """For gate and up, whose activation needs the whole product."""
    _, shared = _device(x.device.index)
    return fit_tile(LinearTile(32, 128, 1, 4, 3), block_rows(x.shape[0]), 2, x.itemsize, shared)


def choose_head_tile(x: Tensor, weight: Tensor) -> LinearTile:
    """For the language-model head, of which each tile keeps its maximum alone."""
    _, shared = _device(x.device.index)
    return fit_tile(LinearTile(64, 128, 1, 4, 4), block_rows(x.shape[0]), 1, x.itemsize, shared)


@dataclass(frozen=True)
class AttentionTile:
    """Cached tokens in one tile of the fused attention, and how it is run."""

    block_n: int
    num_warps: int
    num_stages: int


def choose_attention_tile(num_programs: int, pages: Tensor) -> AttentionTile:
    """Few programs take long tiles to keep memory busy; many do it together, and more of short ones fit at a time."""
    num_multiprocessors, shared = _device(pages.device.index)
    block_n = 128 if num_programs <= 4 * num_multiprocessors else 64
    token_bytes = 2 * pages.shape[3] * pages.element_size()
    while block_n > 16 and block_n * token_bytes * 2 > shared * 0.8:
        block_n //= 2
    return AttentionTile(block_n, 4, 2)
