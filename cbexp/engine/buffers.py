"""Device memory of decode steps: the cache's pages as kernels need them, and the static state of a batch's rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerPages:
    """Where one layer's keys and values live.

    `pages` [num_pages, page_size, num_kv_heads, head_dim] is one view of all pages of the layer's allocator.
    `block_table` int32 [max_rows, table_width] never moves; an entry is the first page of a block, so the keys of a
    row's tokens are in page entry + `page_offset` and the values in the page after it (`page_offset` is an int32 0-d
    tensor on the device: an int would make each layer a program of its own).
    `window` is the ring size of a sliding allocator (slot = position % window), 0 for full attention.
    """

    pages: Tensor
    block_table: Tensor
    page_offset: Tensor
    window: int


@dataclass(frozen=True)
class PagePool:
    """All pages of one attention type. A block is `pages_per_block` pages: keys and values of each layer in turn.

    `layer_indices[i]` has its keys `2 * i` pages into a block. `table_width` blocks hold the longest request.
    `trash_page` is the first page of the sector that padding may write and nobody reads.
    """

    layer_indices: tuple[int, ...]
    pages: Tensor
    pages_per_block: int
    trash_page: int
    table_width: int
    window: int


class RowSampling(NamedTuple):
    """How a row is sampled: its values by `SamplingColumn`, and the ids that it has where the penalty needs them."""

    settings: tuple[int, ...]
    seen_ids: Sequence[int] = ()


@dataclass(frozen=True)
class DecodeRow:
    """One request of a batch: the token to feed and where, how many it may still produce, its blocks by attention.

    `sampling` is None in a greedy drive.
    """

    token_id: int
    position: int
    remaining: int
    blocks: Mapping[str, Sequence[int]]
    sampling: RowSampling | None = None


class RowValue(NamedTuple):
    """A value of each row in `DecodeBuffers`: its dtype, and what it is for a row without a request.

    `source` is the field of `DecodeRow` that an upload brings, a 32-bit integer; empty: steps alone write it.
    """

    dtype: torch.dtype
    unused: float
    source: str = ""


# By the name of the tensor in `DecodeBuffers`.
ROW_STATE = {
    "token_ids": RowValue(torch.int64, 0, "token_id"),
    "positions": RowValue(torch.int32, -1, "position"),
    "remaining": RowValue(torch.int32, 0, "remaining"),
    "best_logits": RowValue(torch.float32, 0.0),
}
UPLOADED = {name: value for name, value in ROW_STATE.items() if value.source}


# Different sets of stop or suppressed ids that the requests of one drive may have, the empty one among them.
MAX_TOKEN_SETS = 128
# In the place of a token: the row's logits are not finite, or leave nothing to choose.
NOT_FINITE = -2


class SamplingColumn(IntEnum):
    """Columns of `SamplingBuffers.settings`. The first five but `TOP_K` are floats, as their bits.

    `FIRST_STOP`: a stop id ends nothing, and is not chosen, at positions below. `STOP_SET` and `SUPPRESSED_SET` are
    lines of `token_sets`. The last three number the completion: its submission, the prompt in it, and its generation.
    """

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    REPETITION_PENALTY = 4
    FIRST_STOP = 5
    STOP_SET = 6
    SUPPRESSED_SET = 7
    SUBMISSION = 8
    PROMPT = 9
    GENERATION = 10


# Columns that leave the model's distribution as it is where they are not 0: top_p and the penalty of a greedy row.
_NEUTRAL = {SamplingColumn.TOP_P: 1.0, SamplingColumn.REPETITION_PENALTY: 1.0}


@dataclass(frozen=True)
class SamplingBuffers:
    """What sampled rows have besides, at addresses that never change. A set of token ids is one bit each.

    `settings` int32 [max_rows, len(SamplingColumn)]. `seen` int32 [max_rows, set_width]: the ids that prompt and
    completion have, kept where the penalty is not 1. `token_sets` int32 [num_sets, set_width]: stop ids, EOS among
    them, and suppressed ids; set 0 is empty. `key` int32 [2]: of the random numbers. `logprobs` float32
    [max_burst, max_rows, 4]: of each step's token, as `sampling.sample` gives them. `fp32_head`: whether logits are
    computed in float32.
    """

    settings: Tensor
    seen: Tensor
    token_sets: Tensor
    key: Tensor
    logprobs: Tensor
    fp32_head: bool = False

    def rows(self, num_rows: int) -> SamplingBuffers:
        """Views of the first rows; the sets are everybody's."""
        return replace(
            self,
            settings=self.settings[:num_rows],
            seen=self.seen[:num_rows],
            logprobs=self.logprobs[:, :num_rows],
        )


def set_width(vocab_size: int) -> int:
    """32-bit words that a set of token ids takes: id i is bit i % 32 of word i // 32."""
    return -(-vocab_size // 32)


def pack_ids(token_ids: Iterable[int], width: int) -> Tensor:
    """A set of token ids as int32 [width], on the CPU."""
    is_in = np.zeros(width * 32, dtype=bool)
    is_in[list(token_ids)] = True
    return torch.from_numpy(np.packbits(is_in, bitorder="little").view(np.int32))


def allocate_sampling(
    *,
    max_rows: int,
    max_burst: int,
    vocab_size: int,
    device: torch.device,
    fp32_head: bool = False,
) -> SamplingBuffers:
    """Buffers of greedy rows that have seen nothing, every set empty, the key 0."""
    settings = torch.zeros((max_rows, len(SamplingColumn)), dtype=torch.int32, device=device)
    for column, value in _NEUTRAL.items():
        settings.view(torch.float32)[:, column] = value
    width = set_width(vocab_size)
    return SamplingBuffers(
        settings=settings,
        seen=torch.zeros((max_rows, width), dtype=torch.int32, device=device),
        token_sets=torch.zeros((MAX_TOKEN_SETS, width), dtype=torch.int32, device=device),
        key=torch.zeros(2, dtype=torch.int32, device=device),
        logprobs=torch.zeros((max_burst, max_rows, 4), dtype=torch.float32, device=device),
        fp32_head=fp32_head,
    )


@dataclass(frozen=True)
class DecodeBuffers:
    """State of the rows of a batch, all on the model's device; addresses never change, so graphs may hold them.

    `token_ids` int64 [max_rows]: the token to feed next. `positions` int32 [max_rows]: where it goes, -1 for an
    inactive row (finished or padding). `remaining` int32 [max_rows]: tokens the row may still produce.
    `best_logits` float32 [max_rows]: the logit of the last step's token; anything for rows that were inactive in it.
    `outputs` int32 [max_burst, max_rows]: the token made in each step, -1 for inactive rows, `NOT_FINITE` for a row
    that ended because of its logits. `step` int32 0-d: next row of `outputs`. `eos_ids` int64 [max(1, num_eos)]: -1
    where there is none; read by greedy steps alone. `sampling`: None where all steps are greedy.
    `block_tables`: attention type -> int32 [max_rows, table_width]. `layers` by layer index; `pools` by attention type.
    """

    token_ids: Tensor
    positions: Tensor
    remaining: Tensor
    best_logits: Tensor
    outputs: Tensor
    step: Tensor
    eos_ids: Tensor
    block_tables: dict[str, Tensor]
    layers: tuple[LayerPages, ...]
    pools: Mapping[str, PagePool]
    sampling: SamplingBuffers | None = None

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch."""
        return self.token_ids.shape[0]

    @property
    def max_burst(self) -> int:
        """Steps whose tokens `outputs` can hold."""
        return self.outputs.shape[0]

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.positions.device

    def rows(self, num_rows: int) -> DecodeBuffers:
        """Views of what a step reads and writes of the first rows; block tables stay whole."""
        state = {name: getattr(self, name)[:num_rows] for name in ROW_STATE}
        sampling = None if self.sampling is None else self.sampling.rows(num_rows)
        return replace(self, **state, outputs=self.outputs[:, :num_rows], sampling=sampling)

    def state(self) -> list[Tensor]:
        """What a step changes, but for the cache."""
        of_samples = [self.sampling.seen, self.sampling.logprobs] if self.sampling else []
        return [*(getattr(self, name) for name in ROW_STATE), self.outputs, self.step, *of_samples]

    def clear(self) -> None:
        """Leave no row active, each without a request."""
        for name, value in ROW_STATE.items():
            getattr(self, name).fill_(value.unused)
        self.step.zero_()

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Let the body change everything here but the cache; afterwards it is as before."""
        tensors = [*self.state(), self.eos_ids, *self.block_tables.values()]
        if self.sampling is not None:
            tensors += [self.sampling.settings, self.sampling.token_sets, self.sampling.key]
        copies = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


def allocate_buffers(
    pools: Mapping[str, PagePool],
    *,
    max_rows: int,
    max_burst: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
) -> DecodeBuffers:
    """Buffers with every row inactive and every table entry on its pool's trash; `pools` by attention type."""
    block_tables = {
        name: torch.full((max_rows, pool.table_width), pool.trash_page, dtype=torch.int32, device=device)
        for name, pool in pools.items()
    }
    state = {
        name: torch.full((max_rows,), value.unused, dtype=value.dtype, device=device)
        for name, value in ROW_STATE.items()
    }
    return DecodeBuffers(
        **state,
        outputs=torch.full((max_burst, max_rows), -1, dtype=torch.int32, device=device),
        step=torch.zeros((), dtype=torch.int32, device=device),
        eos_ids=torch.tensor(list(eos_token_ids) or [-1], dtype=torch.int64, device=device),
        block_tables=block_tables,
        layers=_layers(pools, block_tables, device),
        pools=pools,
        sampling=None,
    )


def _layers(
    pools: Mapping[str, PagePool], block_tables: Mapping[str, Tensor], device: torch.device
) -> tuple[LayerPages, ...]:
    by_index = {
        layer_index: LayerPages(
            pages=pool.pages,
            block_table=block_tables[name],
            page_offset=torch.tensor(2 * rank, dtype=torch.int32, device=device),
            window=pool.window,
        )
        for name, pool in pools.items()
        for rank, layer_index in enumerate(pool.layer_indices)
    }
    return tuple(by_index[index] for index in sorted(by_index))


class RowUpload:
    """Brings the rows of a batch from the host into `buffers`, in one copy and without waiting for the device.

    The host memory is reused: the copy of one upload must have ended, as it has once a burst's tokens are on the host,
    before the next one starts.
    """

    def __init__(self, buffers: DecodeBuffers) -> None:
        self._buffers = buffers
        max_rows, is_cuda = buffers.max_rows, buffers.device.type == "cuda"
        widths = [*(1 for _ in UPLOADED), *(pool.table_width for pool in buffers.pools.values())]
        if buffers.sampling is not None:
            widths.append(len(SamplingColumn))
        self._host = torch.zeros(max_rows * sum(widths), dtype=torch.int32, pin_memory=is_cuda)
        # On a CPU there is nothing to bring: the buffers are filled from the host memory itself.
        self._staging = torch.zeros_like(self._host, device=buffers.device) if is_cuda else self._host
        self._host_sections: list[Any] = [part.numpy() for part in _split(self._host, max_rows, widths)]
        self._staged_sections = _split(self._staging, max_rows, widths)

    def upload(self, rows: Sequence[DecodeRow]) -> None:
        """Make `rows` the first rows of the buffers and every other row inactive, its blocks on the trash page."""
        self._fill(rows)
        if self._staging is not self._host:
            self._staging.copy_(self._host, non_blocking=True)
        buffers = self._buffers
        targets = [*(getattr(buffers, name) for name in UPLOADED), *buffers.block_tables.values()]
        if buffers.sampling is not None:
            targets.append(buffers.sampling.settings)
            self._upload_seen(rows, buffers.sampling)
        for target, staged in zip(targets, self._staged_sections, strict=True):
            target.copy_(staged.view_as(target))
        buffers.step.zero_()

    def begin_drive(self, token_sets: Tensor, key: Tensor) -> None:
        """Bring what all rows of a sampled drive share: sets int32 [num_sets, set_width], and the key."""
        assert self._buffers.sampling is not None
        self._buffers.sampling.token_sets[: len(token_sets)].copy_(token_sets)
        self._buffers.sampling.key.copy_(key)

    def _upload_seen(self, rows: Sequence[DecodeRow], sampling: SamplingBuffers) -> None:
        seen = sampling.seen
        for index, row in enumerate(rows):
            if row.sampling is not None and row.sampling.seen_ids:
                seen[index].copy_(pack_ids(row.sampling.seen_ids, seen.shape[1]))

    def _fill(self, rows: Sequence[DecodeRow]) -> None:
        values, rest = self._host_sections[: len(UPLOADED)], self._host_sections[len(UPLOADED) :]
        tables = rest[: len(self._buffers.pools)]
        num_rows = len(rows)
        if self._buffers.sampling is not None:
            rest[-1][:num_rows] = [row.sampling.settings for row in rows if row.sampling is not None]
        for section, value in zip(values, UPLOADED.values(), strict=True):
            section[:num_rows, 0] = [getattr(row, value.source) for row in rows]
            section[num_rows:] = value.unused
        for table, (name, pool) in zip(tables, self._buffers.pools.items(), strict=True):
            table[:] = pool.trash_page
            for index, row in enumerate(rows):
                blocks = row.blocks[name]
                table[index, : len(blocks)] = blocks
                table[index, : len(blocks)] *= pool.pages_per_block


def _split(flat: Tensor, max_rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Views [max_rows, width] side by side of a flat tensor."""
    parts = flat.split([max_rows * width for width in widths])
    return [part.view(max_rows, width) for part, width in zip(parts, widths, strict=True)]
