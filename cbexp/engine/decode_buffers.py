"""The static device tensors that decode steps read and write: a captured graph bakes their addresses in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbexp.engine.page_layout import LayerPages, PagePool


@dataclass(frozen=True)
class DecodeBuffers:
    """State of the rows of a batch, all on the model's device; addresses never change.

    `token_ids` int64 [max_rows]: the token to feed next. `positions` int32 [max_rows]: where it goes, -1 for an
    inactive row (finished or padding). `remaining` int32 [max_rows]: tokens the row may still produce.
    `eos_ids` int64 [max(1, num_eos)]: -1 where there is none. `outputs` int32 [max_burst, max_rows]: the token made
    in each step, -1 for inactive rows. `best_logits` float32 [max_rows]: the logit of the last step's token; anything
    for rows that were inactive in it. `step` int32 0-d: next row of `outputs`.
    `block_tables`: attention type -> int32 [max_rows, table_width]. `layers` by layer index.
    """

    token_ids: Tensor
    positions: Tensor
    remaining: Tensor
    eos_ids: Tensor
    outputs: Tensor
    best_logits: Tensor
    step: Tensor
    block_tables: dict[str, Tensor]
    layers: tuple[LayerPages, ...]

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch."""
        return self.token_ids.shape[0]

    @property
    def max_burst(self) -> int:
        """Steps whose tokens `outputs` can hold."""
        return self.outputs.shape[0]


def allocate_decode_buffers(
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
    return DecodeBuffers(
        token_ids=torch.zeros(max_rows, dtype=torch.int64, device=device),
        positions=torch.full((max_rows,), -1, dtype=torch.int32, device=device),
        remaining=torch.zeros(max_rows, dtype=torch.int32, device=device),
        eos_ids=torch.tensor(list(eos_token_ids) or [-1], dtype=torch.int64, device=device),
        outputs=torch.full((max_burst, max_rows), -1, dtype=torch.int32, device=device),
        best_logits=torch.zeros(max_rows, dtype=torch.float32, device=device),
        step=torch.zeros((), dtype=torch.int32, device=device),
        block_tables=block_tables,
        layers=_layers(pools, block_tables, device),
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
