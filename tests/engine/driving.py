"""A whole drive, as most tests of the driver need it, and a look at the cache behind one."""


def drive(driver, prompts, **kwargs):
    """Submit `prompts`, with `kwargs` of `add_requests`, and return the tokens of each completion in their order."""
    request_ids = driver.add_requests(prompts, **kwargs)
    completions = driver.drive_until_empty()
    assert list(completions)[-len(request_ids) :] == request_ids
    return [completion.completion_ids for completion in completions.values()]


def cache_of(driver):
    """Transformers' paged cache."""
    return driver._engine.batcher._cache


def count_referenced_blocks(driver):
    tables = [allocator.block_table for allocator in cache_of(driver).cache_allocators.values()]
    return sum(len(blocks) for table in tables for blocks in table.values())


def check_cache_at_rest(driver):
    """Between drives nothing is referenced, and the sector that transformers' padding reads is zero, bit for bit."""
    if driver._engine is None:
        return
    assert count_referenced_blocks(driver) == 0
    assert driver._engine.batcher.cache_used_fraction == 0
    if not driver._engine.batcher.held_bytes:  # asleep
        return
    read_trash = cache_of(driver).cache_tensor[: cache_of(driver).bytes_per_sector]
    assert len(read_trash) > 0
    assert not read_trash.any()
