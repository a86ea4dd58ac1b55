"""A Triton kernel that does nothing but read: the fastest way through a large buffer, for measuring bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class ReadTile:
    """A program reads `num_blocks` blocks of `block_size` elements, one after another, with `num_warps` warps."""

    block_size: int
    num_blocks: int
    num_warps: int

    @property
    def chunk_size(self) -> int:
        """Elements that one program reads."""
        return self.block_size * self.num_blocks


# Which of them is fastest differs from card to card: they differ in loads in flight and in programs per processor.
READ_TILES = (ReadTile(2048, 8, 4), ReadTile(4096, 8, 8), ReadTile(8192, 4, 8), ReadTile(8192, 16, 16))


def sum_chunks(values: Tensor, sums: Tensor, tile: ReadTile) -> None:
    """Write the sum of each chunk of `values` float32 [n x chunk_size] to `sums` float32 [at least n]."""
    grid = (values.numel() // tile.chunk_size,)
    _sum_chunks_kernel[grid](
        values, sums, BLOCK=tile.block_size, NUM_BLOCKS=tile.num_blocks, num_warps=tile.num_warps
    )


@triton.jit
def _sum_chunks_kernel(values, sums, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    chunk = tl.program_id(0)
    first = values + chunk.to(tl.int64) * (BLOCK * NUM_BLOCKS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(NUM_BLOCKS):  # unrolled, so that loads do not wait for sums
        total += tl.load(first + block * BLOCK)
    tl.store(sums + chunk, tl.sum(total, 0))
