"""Blocks of a burst: reserved for all of its rows or for none, and shared with others once they are complete."""

from __future__ import annotations

import pytest
import torch

from cbexp.engine.burst import BurstRunner
from cbexp.engine.cb_internals import (
    EngineSettings,
    RequestState,
    build_page_pools,
    build_processor,
    build_request_state,
)
from cbexp.engine.decode_requests import reserve_room
from tests.engine.driving import drive

PAGE = 8


@pytest.fixture
def make_cache(shared_model):
    def make(num_blocks, family="qwen3"):
        settings = EngineSettings(
            page_size=PAGE,
            num_blocks=num_blocks,
            max_batch_tokens=64,
            max_requests_per_batch=8,
            allow_block_sharing=False,
            scheduler="fifo",
            attn_implementation=shared_model(family).config._attn_implementation,
        )
        return build_processor(shared_model(family), settings).cache

    return make


def decoding_states(cache, lengths, max_new_tokens=40):
    """Requests whose prompts of these lengths are stored; each has made one token, which is not."""
    states = []
    for index, length in enumerate(lengths):
        state = build_request_state(str(index), list(range(length)), max_new_tokens, (), 0)
        assert cache.can_store_request_tokens(state, length)
        state.position_offset = length
        state.generated_tokens = [1]
        states.append(state)
    return states


def blocks_of(cache):
    (allocator,) = cache.cache_allocators.values()
    return [len(blocks) for blocks in allocator.block_table.values()]


def test_transformers_keeps_what_it_gave_when_it_has_no_more(make_cache):
    """Which is why a burst asks for all rows before it takes for one."""
    cache = make_cache(2)
    given = [cache.can_store_request_tokens(RequestState(str(row), []), PAGE) for row in range(4)]
    assert given == [True, True, False, False]
    assert blocks_of(cache)[:2] == [1, 1]


def test_a_burst_that_fits_is_reserved_whole(make_cache):
    cache = make_cache(20)
    states = decoding_states(cache, [8, 3, 15])
    assert reserve_room(cache, states, 17) == 17
    # 25, 20 and 32 tokens.
    assert blocks_of(cache) == [4, 3, 4]


def test_a_row_takes_no_more_than_it_may_still_make(make_cache):
    cache = make_cache(20)
    states = decoding_states(cache, [8, 8], max_new_tokens=10)
    states[0]._new_tokens_limit = 3
    assert reserve_room(cache, states, 9) == 9
    assert blocks_of(cache) == [2, 3]


@pytest.mark.parametrize(
    ("num_free", "num_steps", "blocks"),
    # Three full blocks; each further page of all rows takes three blocks more.
    [(9, 24, [4, 4, 4]), (8, 12, [3, 3, 3]), (6, 12, [3, 3, 3]), (5, 6, [2, 2, 2]), (3, 6, [2, 2, 2])],
)
def test_a_burst_without_room_is_halved_until_it_has(make_cache, num_free, num_steps, blocks):
    cache = make_cache(3 + num_free)
    states = decoding_states(cache, [8, 8, 8])
    assert reserve_room(cache, states, 24) == num_steps
    assert blocks_of(cache) == blocks


@pytest.mark.parametrize("num_free", [0, 1, 2])
def test_without_room_for_one_step_of_all_nothing_is_taken(make_cache, num_free):
    cache = make_cache(3 + num_free)
    states = decoding_states(cache, [8, 8, 8])
    assert reserve_room(cache, states, 24) == 0
    assert blocks_of(cache) == [1, 1, 1]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_all_kinds_of_layers_have_their_pages_in_one_tensor(make_cache, family):
    """Several would be aliases of one allocation, of which a compiler copies the whole cache for each layer."""
    pools = build_page_pools(make_cache(20, family), max_positions=64)
    assert len({id(pool.pages) for pool in pools.values()}) == 1
    assert all(pool.pages.shape[1:] == (PAGE, 2, 8) for pool in pools.values())


# Sharing


def prefilled(driver):
    return [step.num_tokens for step in driver.steps if step.kind == "prefill"]


@pytest.mark.parametrize("max_burst", [1, 7])
def test_blocks_that_a_burst_completed_serve_later_prompts(
    shared_model, make_driver, make_prompts, reference, max_burst
):
    """Prompts that go on from what another has generated; the burst that ends a request registers none of its own."""
    (start,) = make_prompts((13,))
    made = reference("qwen3", start, 40)
    prompts = [start, [*start, *made[:20]], [*start, *made[:9], 3], [*start, *made[:20]]]
    driver = make_driver(
        shared_model("qwen3"),
        max_new_tokens=40,
        num_blocks=60,
        max_requests_per_batch=1,
        max_burst=max_burst,
        allow_block_sharing=True,
    )
    for _ in range(2):
        assert drive(driver, prompts) == [reference("qwen3", prompt, 40) for prompt in prompts]
        # The prompt's one whole block, which prefill made, and then those of bursts: 33 = 4 * 8 + 1 tokens.
        assert prefilled(driver) == [13, 1, 23 - 16, 1]


def test_blocks_are_shared_with_a_request_that_still_decodes(
    shared_model, make_driver, make_prompts, reference
):
    (start,) = make_prompts((13,))
    longer = [*start, *reference("qwen3", start, 40)[:12]]
    driver = make_driver(
        shared_model("qwen3"),
        max_new_tokens=40,
        num_blocks=60,
        max_requests_per_batch=2,
        max_burst=4,
        allow_block_sharing=True,
    )
    limits = [40, 16, 30]
    tokens = drive(driver, [start, [5], longer], max_new_tokens=limits)
    assert tokens == [
        reference("qwen3", prompt, limit) for prompt, limit in zip([start, [5], longer], limits, strict=True)
    ]
    assert prefilled(driver) == [14, 1]


def test_equal_requests_side_by_side_end_up_on_the_same_blocks(
    shared_model, make_driver, make_prompts, reference
):
    """Each fills blocks of its own, of which all but one are given back as they are completed: tables change."""
    (prompt,) = make_prompts((13,))
    used = {}
    for sharing in (False, True):
        driver = make_driver(
            shared_model("qwen3"),
            max_new_tokens=40,
            num_blocks=60,
            max_burst=4,
            allow_block_sharing=sharing,
        )
        assert drive(driver, [prompt] * 3) == [reference("qwen3", prompt, 40)] * 3
        used[sharing] = max(step.cache_used_fraction for step in driver.steps)
    assert used[True] < 0.6 * used[False]


@pytest.mark.parametrize(("page_size", "shared_blocks"), [(8, 2), (32, 0)])
def test_forks_share_whole_pages_alone(shared_model, make_driver, make_prompts, page_size, shared_blocks):
    """Of a prompt of 20 tokens, two pages of 8 and none of 32; then a page of its own for each of four."""
    driver = make_driver(
        shared_model("qwen3"), page_size=page_size, num_blocks=40, allow_block_sharing=True, max_new_tokens=2
    )
    drive(driver, make_prompts((20,)), num_generations=4)
    (decode,) = [step for step in driver.steps if step.kind == "decode"]
    assert decode.cache_used_fraction == pytest.approx((shared_blocks + 4) / 40)


@torch.no_grad()
def test_forked_keys_and_values_are_there_when_the_burst_starts(
    shared_model, make_driver, make_prompts, reference, monkeypatch
):
    """Every fork's blocks hold what its parent's do at the moment that the rows are brought up."""
    seen = []

    def submit(runner, rows, num_steps, original=BurstRunner.submit):
        pool = runner._upload._pools["full_attention"]
        first = [torch.tensor(row.blocks["full_attention"]) * pool.pages_per_block for row in rows]
        contents = [pool.pages[entries[:, None] + torch.arange(pool.pages_per_block)] for entries in first]
        # Of each page of a block, the 11 tokens that were read, in order.
        seen.append([c.transpose(0, 1).flatten(1, 2)[:, :11].clone() for c in contents])
        return original(runner, rows, num_steps)

    monkeypatch.setattr(BurstRunner, "submit", submit)
    (prompt,) = make_prompts((12,))
    driver = make_driver(shared_model("qwen3"), num_blocks=60)
    seen.clear()  # of the probe
    assert drive(driver, [prompt], num_generations=4) == [reference("qwen3", prompt, 12)] * 4
    parent, *forks = seen[0]
    assert len(forks) == 3
    assert parent.flatten(2).any(-1).all()
    assert all(torch.equal(fork, parent) for fork in forks)
