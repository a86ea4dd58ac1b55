"""Brings the rows of a batch from the host into the static decode buffers, in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbexp.engine.decode_buffers import DecodeBuffers
from cbexp.engine.page_layout import PagePool


@dataclass(frozen=True)
class DecodeRow:
    """One request of a batch: the token to feed and where, how many it may still produce, its blocks by attention."""

    token_id: int
    position: int
    remaining: int
    blocks: Mapping[str, Sequence[int]]


class RowUpload:
    """Fills `DecodeBuffers` without waiting for the device.

    The host memory is reused: the copy of one upload must have ended, as it has once a burst's tokens are on the host,
    before the next one starts.
    """

    def __init__(self, buffers: DecodeBuffers, pools: Mapping[str, PagePool]) -> None:
        self._buffers = buffers
        self._pools = pools
        device, max_rows = buffers.positions.device, buffers.max_rows
        widths = [1, 1, 1, *(pool.table_width for pool in pools.values())]
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(max_rows * sum(widths), dtype=torch.int32, pin_memory=is_cuda)
        # On a CPU there is nothing to bring: the buffers are filled from the host memory itself.
        self._staging = torch.zeros_like(self._host, device=device) if is_cuda else self._host
        self._host_sections: list[Any] = [part.numpy() for part in _split(self._host, max_rows, widths)]
        self._staged_sections = _split(self._staging, max_rows, widths)

    def upload(self, rows: Sequence[DecodeRow]) -> None:
        """Make `rows` the first rows of the buffers and every other row inactive, its blocks on the trash page."""
        self._fill(rows)
        if self._staging is not self._host:
            self._staging.copy_(self._host, non_blocking=True)
        buffers = self._buffers
        targets = [buffers.token_ids, buffers.positions, buffers.remaining, *buffers.block_tables.values()]
        for target, staged in zip(targets, self._staged_sections, strict=True):
            target.copy_(staged.view_as(target))
        buffers.step.zero_()

    def _fill(self, rows: Sequence[DecodeRow]) -> None:
        token_ids, positions, remaining, *tables = self._host_sections
        num_rows = len(rows)
        positions[num_rows:] = -1
        token_ids[:num_rows, 0] = [row.token_id for row in rows]
        positions[:num_rows, 0] = [row.position for row in rows]
        remaining[:num_rows, 0] = [row.remaining for row in rows]
        for table, (name, pool) in zip(tables, self._pools.items(), strict=True):
            table[:] = pool.trash_page
            for index, row in enumerate(rows):
                blocks = row.blocks[name]
                table[index, : len(blocks)] = blocks
                table[index, : len(blocks)] *= pool.pages_per_block


def _split(flat: Tensor, max_rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Views [max_rows, width] side by side of a flat tensor."""
    parts = flat.split([max_rows * width for width in widths])
    return [part.view(max_rows, width) for part, width in zip(parts, widths, strict=True)]
