"""Where the paged cache keeps keys and values, in the terms that a decode kernel needs."""

from __future__ import annotations

from dataclasses import dataclass

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
