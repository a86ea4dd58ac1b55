"""Rows without requests, over random keys and values: what the self-check compares steps on, and steps are timed on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cbexp.engine.buffers import DecodeBuffers, LayerPages, PagePool
from cbexp.engine.types import EngineError

# The first sector is upstream's read trash, which stays zero; the second is its write trash.
WRITE_TRASH_SECTOR = 1
FIRST_FREE_SECTOR = 2
# Of the self-check: short rows leave little to save, so all but the first have fewer tokens than this.
MAX_TOKENS = 16
NUM_TOKEN_IDS = 32


class SyntheticRows:
    """The first rows of `buffers` at positions of all kinds, on pages of a cache in any state, which is put back.

    Of `bucket` rows, the last is inactive when there are several, and so are those for which the cache has no block.
    The first row's new token opens its second block, where tables are wide enough. Tokens are of a vocabulary of
    `vocab_size`, positions less than `max_positions`.
    Raises `EngineError` when the cache has no room for one row.
    """

    def __init__(self, buffers: DecodeBuffers, bucket: int, *, vocab_size: int, max_positions: int) -> None:
        self.bucket = bucket
        self.positions = _choose_positions(buffers.pools, bucket, max_positions)
        self._num_token_ids = min(NUM_TOKEN_IDS, vocab_size)
        self._buffers = buffers
        self._tables = _lay_out_check(buffers.pools, self.positions)
        tables = {
            index: self._tables[name] for name, pool in buffers.pools.items() for index in pool.layer_indices
        }
        self._slots = [
            _Slots(layer, self.positions, tables[index])
            for index, layer in zip(sorted(tables), buffers.layers, strict=True)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the rows' tables in the buffers; afterwards, tables, state and keys and values are as before."""
        contents = [slots.read() for slots in self._slots]
        with self._buffers.saved():
            try:
                for name, table in self._tables.items():
                    self._buffers.block_tables[name][: self.bucket, : table.shape[1]].copy_(table)
                yield
            finally:
                for slots, content in zip(self._slots, contents, strict=True):
                    slots.write(content)

    def reset(self) -> None:
        """Go to the start: the same tokens at the same positions over the same keys and values each time.

        The logits left behind become NaN, so that a step which leaves none has none.
        """
        buffers = self._buffers
        buffers.clear()
        buffers.positions[: self.bucket].copy_(torch.tensor(self.positions, dtype=torch.int32))
        buffers.token_ids[: self.bucket].copy_(torch.arange(self.bucket) % self._num_token_ids)
        buffers.remaining.fill_(2)
        buffers.best_logits.fill_(math.nan)
        for seed, slots in enumerate(self._slots):
            slots.write(slots.random(seed))

    def read_new(self) -> list[Tensor]:
        """Of each layer, the keys and values [2, active rows, num_kv_heads, head_dim] at the rows' positions."""
        return [slots.read()[:, slots.is_new] for slots in self._slots]

    def find_overwritten(self) -> int | None:
        """The first layer in which another slot than those at the rows' positions has changed since `reset`."""
        for index, slots in enumerate(self._slots):
            kept = ~slots.is_new
            if not torch.equal(slots.read()[:, kept], slots.random(index)[:, kept]):
                return index
        return None


def fill_free_pages(buffers: DecodeBuffers, num_rows: int, num_tokens: int) -> None:
    """Give the first rows of an idle cache blocks of their own for `num_tokens` tokens each, of random content.

    Raises `EngineError` when cache or tables are too small for that.
    """
    sector = FIRST_FREE_SECTOR
    for name, pool in buffers.pools.items():
        blocks_per_row = _blocks_per_row(pool, num_tokens)
        num_blocks = num_rows * blocks_per_row
        start = sector * _pages_per_sector(pool)
        end = start + num_blocks * pool.pages_per_block
        if end > pool.pages.shape[0]:
            raise EngineError(
                f"{num_rows} rows of {num_tokens} tokens do not fit in the cache: raise num_blocks "
                f"({name} needs {num_blocks} blocks)."
            )
        # Never of the caller's generator, whose state must not change.
        pool.pages[start:end].normal_(generator=torch.Generator(pool.pages.device))
        entries = torch.arange(start, end, pool.pages_per_block, dtype=torch.int32)
        buffers.block_tables[name][:num_rows, :blocks_per_row].copy_(entries.view(num_rows, blocks_per_row))
        sector += math.ceil((end - start) / _pages_per_sector(pool))


class _Slots:
    """Where the rows' tokens are in one layer; an inactive row has a slot as well, which must stay as it is."""

    def __init__(self, layer: LayerPages, positions: Sequence[int], table: Tensor) -> None:
        rows, slots, is_new = _list_slots(positions, layer.window)
        page_size, device = layer.pages.shape[1], layer.pages.device
        slot = torch.tensor(slots)
        entries = table[torch.tensor(rows), slot // page_size].to(device) + layer.page_offset
        self._pages = layer.pages
        self._index = torch.stack([entries, entries + 1]).long(), (slot % page_size).to(device)
        self.is_new = torch.tensor(is_new, device=device)

    def read(self) -> Tensor:
        """Keys and values [2, slots, num_kv_heads, head_dim]."""
        return self._pages[self._index]

    def write(self, content: Tensor) -> None:
        """Put `content`, as read, back."""
        self._pages[self._index] = content

    def random(self, seed: int) -> Tensor:
        """Random contents, the same for the same seed."""
        generator = torch.Generator(self._pages.device).manual_seed(seed)
        shape = (2, len(self.is_new), *self._pages.shape[2:])
        return torch.randn(shape, generator=generator, dtype=self._pages.dtype, device=self._pages.device)


def _list_slots(positions: Sequence[int], window: int) -> tuple[list[int], list[int], list[bool]]:
    """Row, slot and whether the new token goes there, for every slot that the rows use."""
    listed = []
    for row, position in enumerate(positions):
        newest = position % window if window and position >= 0 else position
        num_slots = min(position + 1, window) if window else position + 1
        listed += [(row, slot, slot == newest) for slot in range(max(1, num_slots))]
        if position < 0:
            break  # inactive rows are the last ones, and have the same block
    rows, slots, is_new = zip(*listed, strict=True)
    return list(rows), list(slots), list(is_new)


def _choose_positions(pools: Mapping[str, PagePool], bucket: int, max_positions: int) -> list[int]:
    """Position of each row, -1 for an inactive one."""
    page_size = next(iter(pools.values())).pages.shape[1]
    num_active = next((n for n in range(max(1, bucket - 1), 0, -1) if _fits(pools, n)), 0)
    if num_active == 0:
        raise EngineError(
            "The self-check needs a cache of three blocks: raise num_blocks, or set self_check=False."
        )
    widths = [pool.table_width for pool in pools.values() if not pool.window]
    first = page_size if min(widths, default=1) > 1 else page_size - 1
    others = [(7 * row) % min(page_size, MAX_TOKENS, max_positions) for row in range(1, num_active)]
    return [min(first, max_positions - 1), *others] + [-1] * (bucket - num_active)


def _fits(pools: Mapping[str, PagePool], num_active: int) -> bool:
    needed = sum(_num_check_sectors(pool, num_active) for pool in pools.values())
    return all(
        WRITE_TRASH_SECTOR + needed <= pool.pages.shape[0] // _pages_per_sector(pool)
        for pool in pools.values()
    )


def _lay_out_check(pools: Mapping[str, PagePool], positions: Sequence[int]) -> dict[str, Tensor]:
    """Attention type -> int32 [rows, 1 or 2]: one block a row and two for the first, on sectors of the pool's own.

    The write trash may be used like any other sector. Inactive rows share the last block, in which nothing may change.
    """
    tables = {}
    num_active = sum(position >= 0 for position in positions)
    sector = WRITE_TRASH_SECTOR
    for name, pool in pools.items():
        own = torch.arange(len(positions)).clamp(max=num_active)
        width = min(2, pool.table_width)
        table = (own[:, None] + 1).expand(-1, width).clone()
        table[0] = torch.arange(width)
        tables[name] = (sector * _pages_per_sector(pool) + table * pool.pages_per_block).int()
        sector += _num_check_sectors(pool, num_active)
    return tables


def _num_check_sectors(pool: PagePool, num_active: int) -> int:
    """Of active rows, the first of which has two blocks, and of inactive ones, which have one together."""
    return math.ceil((num_active + 2) * pool.pages_per_block / _pages_per_sector(pool))


def _pages_per_sector(pool: PagePool) -> int:
    """The write trash is the second sector, so its first page is the length of one."""
    return pool.trash_page


def _blocks_per_row(pool: PagePool, num_tokens: int) -> int:
    """Blocks of a row; a sliding pool's ring holds its window and no more."""
    num_stored = min(num_tokens, pool.window) if pool.window else num_tokens
    num_blocks = math.ceil(num_stored / pool.pages.shape[1])
    if num_blocks > pool.table_width:
        raise EngineError(
            f"a row of {num_tokens} tokens takes {num_blocks} blocks, and the block table holds {pool.table_width}."
        )
    return num_blocks
