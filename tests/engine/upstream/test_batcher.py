"""Rows for bursts: room for all of them or for none, in order, on blocks that are shared once they are complete."""

import time
from types import SimpleNamespace

import pytest
import torch

from cbexp.engine.forward import PlainForward
from cbexp.engine.requests import RequestBook
from cbexp.engine.row_sampling import DriveSampling
from cbexp.engine.upstream import Batcher
from cbexp.engine.upstream.build import build_page_pools
from tests.engine.models import VOCAB_SIZE
from tests.engine.upstream.processors import new_group, settings_for

PAGE = 8


@pytest.fixture
def start(shared_model):
    """(blocks, prompt lengths, limits) -> a batcher whose requests have made one token each."""

    def start(num_blocks, lengths, limits):
        model = shared_model("qwen3")
        batcher = Batcher(model, settings_for(model, num_blocks=num_blocks))
        groups = [
            new_group(index, range(length), limit)
            for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
        ]
        sampling = DriveSampling(groups, seed=0, vocab_size=VOCAB_SIZE)
        batcher.begin(RequestBook(groups), sampling, safety_margin=0.0, num_slots=8)
        for group in groups:
            batcher.submit(group)
        # A `RunsPrompts` by the model's own code.
        own_code = SimpleNamespace(timing_batch=torch.no_grad, prefill=PlainForward(model, ()).prefill)
        assert batcher.run_prefill(own_code, time.perf_counter()).num_requests == len(groups)
        return batcher

    return start


def open_burst(batcher, num_steps):
    """A burst of `num_steps` wished for: its steps (None: no burst), and the blocks of each request."""
    burst = batcher.open_burst(8, lambda remaining, is_queue_empty: num_steps)
    (allocator,) = batcher._cache.cache_allocators.values()
    return burst and burst.num_steps, [len(blocks) for blocks in allocator.block_table.values()]


def test_a_burst_that_fits_is_reserved_whole_and_no_more_than_a_row_may_still_make(start):
    # 25, 20 and 32 tokens.
    assert open_burst(start(20, [8, 3, 15], [40] * 3), 17) == (17, [4, 3, 4])
    # The first one two tokens, of which the last is never stored.
    assert open_burst(start(20, [8, 8], [3, 10]), 9) == (9, [2, 3])


@pytest.mark.parametrize(
    ("num_free", "num_steps", "blocks"),
    # Three full blocks; each further page of all rows takes three blocks more, and with less there is no burst.
    [(9, 24, 4), (8, 12, 3), (5, 6, 2), (2, None, 1), (0, None, 1)],
)
def test_a_burst_without_room_is_halved_until_it_has(start, num_free, num_steps, blocks):
    assert open_burst(start(3 + num_free, [8] * 3, [40] * 3), 24) == (num_steps, [blocks] * 3)


def test_the_longest_rows_come_first_and_no_more_than_asked_for(start):
    """Attention starts its programs in that order, and a long one begun last would run on alone."""
    batcher, asked = start(40, [3, 9, 5, 7], [6, 12, 6, 8]), []

    def choose(remaining, is_queue_empty):
        asked.append((remaining, is_queue_empty))
        return 2

    for max_rows in (4, 3):
        rows = batcher.open_burst(max_rows, choose).rows
        # Those admitted first.
        assert [row.position for row in rows] == {4: [9, 7, 5, 3], 3: [9, 5, 3]}[max_rows]
    assert asked == [([11, 7, 5, 5], True), ([11, 5, 5], False)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_all_kinds_of_layers_have_their_pages_in_one_tensor(make_processor, family):
    """Several would be aliases of one allocation, of which a compiler copies the whole cache for each layer."""
    pools = build_page_pools(make_processor(family).cache, max_positions=64)
    assert len({id(pool.pages) for pool in pools.values()}) == 1
    assert all(pool.pages.shape[1:] == (PAGE, 2, 8) for pool in pools.values())


# Sharing, in whole drives

SHARING = {"num_blocks": 60, "allow_block_sharing": True}


def prefilled(driver):
    return [step.num_tokens for step in driver.steps if step.kind == "prefill"]


def test_blocks_that_a_burst_completed_serve_later_prompts(check_drive, make_prompts, reference):
    """Prompts that go on from what another has generated; the burst that ends a request registers none of its own."""
    (start,) = make_prompts((13,))
    made = reference("qwen3", start, 40)
    prompts = [start, [*start, *made[:20]], [*start, *made[:9], 3], [*start, *made[:20]]]
    driver = check_drive("qwen3", prompts, 40, max_requests_per_batch=1, max_burst=7, **SHARING)
    # The prompt's one whole block, which prefill made, and then those of bursts: 33 = 4 * 8 + 1 tokens.
    assert prefilled(driver) == [13, 1, 23 - 16, 1]
    check_drive("qwen3", prompts, 40, driver=driver)
    assert prefilled(driver) == [13, 1, 23 - 16, 1]


def test_equal_requests_side_by_side_end_up_on_the_same_blocks(check_drive, make_prompts):
    """Each fills blocks of its own, of which all but one are given back as they are completed: tables change."""
    used = {}
    for sharing in (False, True):
        settings = SHARING | {"max_burst": 4, "allow_block_sharing": sharing}
        driver = check_drive("qwen3", make_prompts((13,)) * 3, 40, **settings)
        used[sharing] = max(step.cache_used_fraction for step in driver.steps)
    assert used[True] < 0.6 * used[False]


@pytest.mark.parametrize(("page_size", "shared_blocks"), [(8, 2), (32, 0)])
def test_forks_share_whole_pages_alone(check_drive, make_prompts, page_size, shared_blocks):
    """Of a prompt of 20 tokens, two pages of 8 and none of 32; then a page of its own for each of four."""
    settings = SHARING | {"page_size": page_size}
    driver = check_drive("qwen3", make_prompts((20,)), 2, num_generations=4, **settings)
    (decode,) = [step for step in driver.steps if step.kind == "decode"]
    assert decode.cache_used_fraction == pytest.approx((shared_blocks + 4) / 60)
