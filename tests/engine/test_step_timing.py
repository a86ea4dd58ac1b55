"""Timing steps over synthetic rows: each row has pages of its own, no trash is touched, the buffers come back."""

from __future__ import annotations

import pytest
import torch

from cbexp.engine.buffers import allocate_buffers
from cbexp.engine.buffers import PagePool
from cbexp.engine.sampling import advance
from cbexp.engine.step_timing import time_decode_steps
from cbexp.engine.types import EngineError

PAGE_SIZE = 8
NUM_SECTORS = 10


def make_pool(layers, blocks_per_sector, table_width, window=0):
    pages_per_block = 2 * len(layers)
    pages = torch.zeros(NUM_SECTORS * blocks_per_sector * pages_per_block, PAGE_SIZE, 1, 2)
    return PagePool(layers, pages, pages_per_block, blocks_per_sector * pages_per_block, table_width, window)


@pytest.fixture
def pools():
    return {
        "full_attention": make_pool((1,), 3, 4),
        "sliding_attention": make_pool((0, 2, 3), 1, 2, window=12),
    }


@pytest.fixture
def buffers(pools):
    return allocate_buffers(
        pools, max_rows=3, max_burst=4, eos_token_ids=(1,), device=torch.device("cpu")
    )


class RecordingRunner:
    """Advances rows to the EOS token, and keeps what it was given."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.starts = []

    def run(self, bucket, num_steps):
        tables = {name: table.clone() for name, table in self.buffers.block_tables.items()}
        self.starts.append((self.buffers.positions.tolist(), int(self.buffers.step), tables))
        for _ in range(num_steps):
            advance(self.buffers, torch.ones(bucket, dtype=torch.int64), torch.zeros(bucket))
        assert (self.buffers.positions[:bucket] > 0).all(), "a row ended"


def time_steps(runner, pools, **changes):
    asked = {"bucket": 2, "context": 21, "num_steps": 4, "num_bursts": 3} | changes
    return time_decode_steps(runner, runner.buffers, pools, **asked)


def test_every_burst_starts_at_the_same_place_around_the_context(buffers, pools):
    runner = RecordingRunner(buffers)
    seconds = time_steps(runner, pools)
    assert len(seconds) == 3
    assert all(value > 0 for value in seconds)
    assert len(runner.starts) == 4
    # Steps at 18 to 21 attend to 19 to 22 tokens; the row beyond the bucket is inactive.
    assert all((positions, step) == ([18, 18, -1], 0) for positions, step, _ in runner.starts)


def test_rows_share_no_page_and_leave_the_trash_alone(buffers, pools):
    runner = RecordingRunner(buffers)
    time_steps(runner, pools)
    tables = runner.starts[0][2]
    # 22 tokens: three pages of a full layer, and the two of the ring, from the third sector on.
    assert tables["full_attention"].tolist() == [[12, 14, 16, 6], [18, 20, 22, 6], [6] * 4]
    assert tables["sliding_attention"].tolist() == [[24, 30], [36, 42], [6] * 2]
    for pool in pools.values():
        assert not pool.pages[: 2 * pool.trash_page].any()
    assert pools["full_attention"].pages[12:24].all()
    assert not pools["full_attention"].pages[24:].any()
    # Two sectors went to the full layers: the ring's pages begin in the fifth.
    assert not pools["sliding_attention"].pages[:24].any()


def test_buffers_come_back_as_they_were_after_an_error_too(buffers, pools):
    tensors = [buffers.token_ids, buffers.positions, buffers.remaining, buffers.eos_ids, buffers.outputs]
    tensors += [buffers.best_logits, buffers.step, *buffers.block_tables.values()]
    buffers.best_logits.fill_(2.5)
    buffers.positions[1], buffers.token_ids[1] = 7, 5
    before = [tensor.clone() for tensor in tensors]
    time_steps(RecordingRunner(buffers), pools)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))

    class FailingRunner(RecordingRunner):
        def run(self, bucket, num_steps):
            super().run(bucket, num_steps)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        time_steps(FailingRunner(buffers), pools)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bucket": 4}, "bucket=4 must be from 1 to 3"),
        ({"num_steps": 5}, "num_steps=5 must be from 1 to 4"),
        ({"context": 40}, r"a row of 41 tokens takes 6 blocks, and the block table holds 4"),
    ],
)
def test_what_does_not_fit_is_refused(buffers, pools, changes, message):
    runner = RecordingRunner(buffers)
    with pytest.raises(EngineError, match=message):
        time_steps(runner, pools, **changes)
    assert not runner.starts


def test_a_cache_that_is_too_small_is_refused(buffers):
    small = {"full_attention": make_pool((1,), 1, 4)}  # eight blocks beside the trash
    buffers = allocate_buffers(
        small, max_rows=3, max_burst=4, eos_token_ids=(), device=torch.device("cpu")
    )
    runner = RecordingRunner(buffers)
    with pytest.raises(EngineError, match=r"3 rows of 22 tokens do not fit in the cache.*9 blocks"):
        time_steps(runner, small, bucket=3)
    assert buffers.positions.tolist() == [-1] * 3


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_driver_gives_the_same_tokens_before_and_after(family, shared_model, make_prompts, make_driver):
    driver = make_driver(shared_model(family), num_blocks=80, max_burst=8)

    def run_round():
        driver.add_requests(make_prompts((5, 17, 40)))
        return [list(completion) for completion in driver.drive_until_empty().values()]

    before = run_round()
    seconds = driver.time_decode_steps(batch=4, context=50, num_steps=8, num_bursts=2)
    assert len(seconds) == 2
    assert all(0 < value < 5 for value in seconds)
    assert run_round() == before


def test_a_driver_without_a_cache_of_fixed_size_is_refused(shared_model, make_driver):
    driver = make_driver(shared_model("qwen3"))
    with pytest.raises(EngineError, match="num_blocks"):
        driver.time_decode_steps(batch=1, context=4, num_steps=4, num_bursts=1)


@pytest.mark.parametrize("name", ["batch", "context", "num_steps", "num_bursts"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_a_driver_checks_what_it_is_to_time(shared_model, make_driver, name, value, error):
    driver = make_driver(shared_model("qwen3"), num_blocks=20)
    asked = {"batch": 1, "context": 4, "num_steps": 4, "num_bursts": 1} | {name: value}
    with pytest.raises(error, match=f"^{name}={value}"):
        driver.time_decode_steps(**asked)
    assert len(driver.time_decode_steps(batch=1, context=4, num_steps=4, num_bursts=2)) == 2


def test_a_closed_driver_times_nothing(shared_model, make_driver):
    driver = make_driver(shared_model("qwen3"), num_blocks=20)
    driver.close()
    with pytest.raises(EngineError, match="closed"):
        driver.time_decode_steps(batch=1, context=4, num_steps=4, num_bursts=1)
