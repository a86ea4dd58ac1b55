"""Rows without requests, over random keys and values: what the self-check compares steps on, and steps are timed on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cbexp.engine.buffers import (
    DecodeBuffers,
    LayerPages,
    PagePool,
    SamplingBuffers,
    SamplingColumn,
    pack_ids,
)
from cbexp.engine.types import EngineError

# The first sector is upstream's read trash, which stays zero; the second is its write trash.
WRITE_TRASH_SECTOR = 1
FIRST_FREE_SECTOR = 2
# Of the self-check. Rows end in each of so many steps, and one goes on; pages have at least four slots.
NUM_STEPS = 3
# Short rows leave little to save, so all but the first reach fewer tokens than this.
MAX_TOKENS = 16
NUM_TOKEN_IDS = 32
# The first row reaches as far as it may, but for the time that it takes. In plain torch every row costs as much as the
# longest: so many slots together.
MAX_FAR_TOKENS = 2**14
MAX_SLOTS_ON_CPU = 2**12
# What the first row has of its own to read; its table repeats that.
MAX_STORED_TOKENS = 512
# No token that a step records.
NOT_WRITTEN = torch.iinfo(torch.int32).min


class SyntheticRows:
    """The first rows of `buffers` at positions of all kinds, on pages of a cache in any state, which is put back.

    All rows of `bucket` are active, but for those in the middle for which the cache has no block. The first is far: its
    new token opens a block where tables are wide enough, and the blocks before are few, each many times in its table;
    no step writes to them. The others are short. In `num_steps` steps, some rows end by their limits. Tokens are of a
    vocabulary of `vocab_size`, positions less than `max_positions`.
    Raises `EngineError` when the cache has no room for one row.
    """

    def __init__(self, buffers: DecodeBuffers, bucket: int, *, vocab_size: int, max_positions: int) -> None:
        self.bucket = bucket
        self.num_steps = min(NUM_STEPS, buffers.max_burst, max_positions)
        self._buffers = buffers
        pools = buffers.pools
        far = _choose_far_position(buffers, bucket, self.num_steps, max_positions)
        spans = {name: _FarSpan.of(pool, far, self.num_steps) for name, pool in pools.items()}
        num_active, num_stored = _choose_numbers(pools, spans, bucket)
        num_short = min(MAX_TOKENS, _page_size(pools), max_positions) - self.num_steps + 1
        # The last one's is the highest, and neighbours differ.
        short = [(row - bucket) % num_short for row in range(bucket)]
        self.positions = [far, *[-1] * (bucket - num_active), *short[bucket - num_active + 1 :]]
        self._token_ids = [(row - bucket) % min(NUM_TOKEN_IDS, vocab_size) for row in range(bucket)]
        # The last row goes on, those before it end one step earlier each, and the first at the end.
        limits = [1 + (row - bucket) % (NUM_STEPS + 1) for row in range(bucket)]
        self._limits = [NUM_STEPS, *limits[1:]]
        self._layouts: dict[str, _Layout] = {}
        sector = WRITE_TRASH_SECTOR
        for name, pool in pools.items():
            start = sector * _pages_per_sector(pool)
            self._layouts[name] = _lay_out(
                pool, self.positions, self.num_steps, spans[name], num_stored, start
            )
            sector += _num_check_sectors(pool, spans[name], num_active, num_stored)
        layouts = {index: self._layouts[name] for name, pool in pools.items() for index in pool.layer_indices}
        self._slots = [
            _Slots(layer, layouts[index])
            for index, layer in zip(sorted(layouts), buffers.layers, strict=True)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the rows' tables in the buffers; afterwards, tables, state and keys and values are as before."""
        contents = [slots.read() for slots in self._slots]
        with self._buffers.saved():
            try:
                for name, layout in self._layouts.items():
                    self._buffers.block_tables[name][: self.bucket].copy_(layout.table)
                yield
            finally:
                for slots, content in zip(self._slots, contents, strict=True):
                    slots.write(content)

    def reset(self, eos_id: int = -1) -> None:
        """Go to the start: the same tokens at the same positions over the same keys and values each time."""
        self.reset_state(eos_id)
        for seed, slots in enumerate(self._slots):
            slots.write(slots.random(seed))

    def reset_state(self, eos_id: int = -1) -> None:
        """`reset`, but for the cache. `eos_id` -1: no token ends a row.

        The logits left behind become NaN and the outputs `NOT_WRITTEN`, so that a step which leaves none has none.
        """
        buffers = self._buffers
        buffers.clear()
        for target, values in (
            (buffers.positions, self.positions),
            (buffers.token_ids, self._token_ids),
            (buffers.remaining, self._limits),
        ):
            target[: self.bucket].copy_(torch.tensor(values, dtype=target.dtype))
        buffers.eos_ids.fill_(-1)[-1] = eos_id
        if buffers.sampling is not None:
            self._reset_sampling(buffers.sampling, eos_id)
        buffers.best_logits.fill_(math.nan)
        buffers.outputs.fill_(NOT_WRITTEN)

    def _reset_sampling(self, sampling: SamplingBuffers, eos_id: int) -> None:
        """Every other row is drawn at a temperature of 1, the others are greedy; each has numbers of its own."""
        settings = sampling.settings
        settings.zero_()
        floats = settings.view(torch.float32)
        floats[:, SamplingColumn.TOP_P] = floats[:, SamplingColumn.REPETITION_PENALTY] = 1
        floats[1::2, SamplingColumn.TEMPERATURE] = 1
        settings[:, SamplingColumn.STOP_SET] = 1
        settings[:, SamplingColumn.GENERATION] = torch.arange(len(settings), dtype=torch.int32)
        sampling.token_sets[1].copy_(pack_ids([eos_id] if eos_id >= 0 else [], sampling.token_sets.shape[1]))
        sampling.logprobs.fill_(math.nan)

    def read_new(self, counts: Tensor) -> list[Tensor]:
        """Of each layer, the keys and values [2, slots, num_kv_heads, head_dim] that the rows have written.

        `counts` int64 [bucket]: how many steps each row was active in.
        """
        return [slots.read(slots.is_new(counts)) for slots in self._slots]

    def write_new(self, counts: Tensor, contents: Sequence[Tensor]) -> None:
        """Put `contents`, as `read_new` gave them, back."""
        for slots, content in zip(self._slots, contents, strict=True):
            slots.write(content, slots.is_new(counts))

    def find_overwritten(self, counts: Tensor) -> int | None:
        """The first layer in which a slot has changed since `reset` that the rows were not to write."""
        for index, slots in enumerate(self._slots):
            kept = ~slots.is_new(counts)
            if not torch.equal(slots.read(kept), slots.random(index)[:, kept]):
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


@dataclass(frozen=True)
class _FarSpan:
    """Columns of the first row's table: those that its steps write to, and those that they only read."""

    written: tuple[int, ...]
    stored: tuple[int, ...]

    @classmethod
    def of(cls, pool: PagePool, position: int, num_steps: int) -> _FarSpan:
        """Of a row at `position` in its first step."""
        page_size = pool.pages.shape[1]
        num_slots = position + num_steps
        written = {_slot(pool, p) // page_size for p in range(position, num_slots)}
        num_columns = math.ceil(min(num_slots, pool.window or num_slots) / page_size)
        return cls(tuple(sorted(written)), tuple(c for c in range(num_columns) if c not in written))


@dataclass(frozen=True)
class _Layout:
    """Where the rows are in one pool: `table` int32 [bucket, table_width], and every slot that they use, once.

    Of each slot, int64: the first page of its block, its place in a page, its row, the step in which the row writes it
    (-1: in none), and which of the first row's stored blocks it is in, from 1 (0: in none).
    """

    table: Tensor
    pages: Tensor
    places: Tensor
    rows: Tensor
    steps: Tensor
    stored: Tensor


class _Slots:
    """The slots of the rows' tokens in one layer."""

    def __init__(self, layer: LayerPages, layout: _Layout) -> None:
        device = layer.pages.device
        entries = layout.pages.to(device) + layer.page_offset
        self._pages = layer.pages
        self._entries, self._places = torch.stack([entries, entries + 1]), layout.places.to(device)
        self._rows, self._steps = layout.rows.to(device), layout.steps.to(device)
        self._stored, self._num_stored = layout.stored.to(device), int(layout.stored.max())

    def is_new(self, counts: Tensor) -> Tensor:
        """Bool [slots]: written by rows that were active in so many steps."""
        return (self._steps >= 0) & (self._steps < counts[self._rows])

    def read(self, which: Tensor | slice = slice(None)) -> Tensor:
        """Keys and values [2, slots, num_kv_heads, head_dim], of all slots or of some."""
        return self._pages[self._entries[:, which], self._places[which]]

    def write(self, content: Tensor, which: Tensor | slice = slice(None)) -> None:
        """Put `content`, as read, back."""
        self._pages[self._entries[:, which], self._places[which]] = content

    def random(self, seed: int) -> Tensor:
        """Random contents, the same for the same seed.

        The values of each stored block have a mean of their own: one that is not read is missed.
        """
        content = self._draw(2, len(self._rows), seed=seed)
        means = self._draw(1 + self._num_stored, seed=~seed)
        means[0] = 0
        content[1] += means[self._stored]
        return content

    def _draw(self, *shape: int, seed: int) -> Tensor:
        pages = self._pages
        generator = torch.Generator(pages.device).manual_seed(seed)
        sizes = (*shape, *pages.shape[2:])
        return torch.randn(sizes, generator=generator, dtype=pages.dtype, device=pages.device)


def _choose_far_position(buffers: DecodeBuffers, bucket: int, num_steps: int, max_positions: int) -> int:
    """Where the first row starts: as far as it may, at a block's first slot when that is not its first block."""
    page_size = _page_size(buffers.pools)
    most = MAX_FAR_TOKENS
    if buffers.device.type == "cpu":
        most = max(page_size + num_steps, MAX_SLOTS_ON_CPU // bucket)
    widths = [pool.table_width for pool in buffers.pools.values() if not pool.window]
    last = min(most, max_positions, *(width * page_size for width in widths)) - num_steps
    return last // page_size * page_size or last


def _choose_numbers(
    pools: Mapping[str, PagePool], spans: Mapping[str, _FarSpan], bucket: int
) -> tuple[int, int]:
    """How many rows are active, and how many blocks the first one has stored: as many as the cache has room for."""

    def fits(num_active: int, num_stored: int) -> bool:
        needed = sum(
            _num_check_sectors(pool, spans[name], num_active, num_stored) for name, pool in pools.items()
        )
        return all(
            WRITE_TRASH_SECTOR + needed <= pool.pages.shape[0] // _pages_per_sector(pool)
            for pool in pools.values()
        )

    num_active = next((n for n in range(bucket, 0, -1) if fits(n, 1)), 0)
    if num_active == 0:
        raise EngineError(
            "The self-check needs a cache of three blocks: raise num_blocks, or set self_check=False."
        )
    most = max(1, MAX_STORED_TOKENS // _page_size(pools))
    return num_active, next(n for n in range(most, 0, -1) if fits(num_active, n))


def _lay_out(
    pool: PagePool,
    positions: Sequence[int],
    num_steps: int,
    span: _FarSpan,
    num_stored: int,
    first_page: int,
) -> _Layout:
    """Blocks from `first_page` on: the first row's stored ones and those that it writes, then one for each short row.

    The write trash may be used like any other sector. Inactive rows have a stored block, in which nothing may change.
    """
    page_size = pool.pages.shape[1]
    num_stored = _num_stored(span, num_stored)
    num_of_first = num_stored + len(span.written)
    blocks = torch.zeros(len(positions), pool.table_width, dtype=torch.int32)
    active = [row for row, position in enumerate(positions) if position >= 0]
    for index, row in enumerate(active[1:]):
        blocks[row] = num_of_first + index
    for index, column in enumerate(span.stored):
        blocks[0, column] = index * num_stored // len(span.stored)
    for index, column in enumerate(span.written):
        blocks[0, column] = num_stored + index
    # (block, place) -> (row, step)
    used = {(block, place): (0, -1) for block in range(num_of_first) for place in range(page_size)}
    for row in active:
        start = positions[row]
        num_slots = start + num_steps
        # A short row has one slot more, where there is one, which must stay as it is.
        for position in range(start, num_slots) if row == 0 else range(min(num_slots + 1, page_size)):
            slot = _slot(pool, position)
            key = int(blocks[row, slot // page_size]), slot % page_size
            if used.get(key, (row, -1))[1] < 0:  # in the smallest rings, a slot is written more than once
                used[key] = row, max(-1, position - start)
    first, places = torch.tensor(list(used)).T
    rows, steps = torch.tensor(list(used.values())).T
    return _Layout(
        table=first_page + blocks * pool.pages_per_block,
        pages=first_page + first * pool.pages_per_block,
        places=places,
        rows=rows,
        steps=steps,
        stored=torch.where(first < num_stored, first + 1, 0),
    )


def _num_check_sectors(pool: PagePool, span: _FarSpan, num_active: int, num_stored: int) -> int:
    """Of the first row, and of the other active ones, which have a block each."""
    num_blocks = _num_stored(span, num_stored) + len(span.written) + num_active - 1
    return math.ceil(num_blocks * pool.pages_per_block / _pages_per_sector(pool))


def _num_stored(span: _FarSpan, num_stored: int) -> int:
    """Blocks that nobody writes: no more than there are columns for them, and one for inactive rows."""
    return min(num_stored, max(1, len(span.stored)))


def _slot(pool: PagePool, position: int) -> int:
    return position % pool.window if pool.window else position


def _page_size(pools: Mapping[str, PagePool]) -> int:
    return int(next(iter(pools.values())).pages.shape[1])


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
