"""How much of transformers' paged cache is in use, and how it is emptied."""

from __future__ import annotations

from cbexp.engine.cb_internals import PagedAttentionCache


def cache_used_fraction(cache: PagedAttentionCache) -> float:
    """Share of the cache that requests reference, in [0, 1]; blocks kept for prefix matches count as free."""
    kept_bytes = sum(
        len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
        for allocator in cache.cache_allocators.values()
    )
    total_bytes = cache.num_sectors * cache.bytes_per_sector
    free_bytes = cache.compute_free_capacity(relative=False)
    return float((total_bytes - free_bytes - kept_bytes) / total_bytes)


def count_referenced_blocks(cache: PagedAttentionCache) -> int:
    """Block-table entries of live requests over all attention types; 0 when the cache is empty."""
    tables = [allocator.block_table for allocator in cache.cache_allocators.values()]
    return sum(len(blocks) for table in tables for blocks in table.values())


def empty_cache(cache: PagedAttentionCache) -> None:
    """Free every block, those kept for prefix matches too, whatever an interrupted step has left behind."""
    for allocator in cache.cache_allocators.values():
        allocator.block_table.clear()
        allocator.ledger.reset()
    cache.pool.reset()
