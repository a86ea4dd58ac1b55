"""What is timed: decode steps over synthetic rows, and the device's waiting between bursts and batches of prompts."""

from dataclasses import dataclass

import pytest
import torch

from cbexp.engine.buffers import PagePool, allocate_buffers
from cbexp.engine.decode.timing import DeviceIdle, time_decode_steps
from cbexp.engine.sampling import advance
from cbexp.engine.types import EngineError
from tests.engine.driving import drive

# Steps over synthetic rows


def make_pool(layers, blocks_per_sector, table_width, window=0):
    pages_per_block = 2 * len(layers)
    pages = torch.zeros(10 * blocks_per_sector * pages_per_block, 8, 1, 2)  # ten sectors of pages of 8 tokens
    return PagePool(layers, pages, pages_per_block, blocks_per_sector * pages_per_block, table_width, window)


class RecordingRunner:
    """Advances rows to the EOS token, and keeps what it was given. The pools have no rows that live."""

    def __init__(self, **pools):
        sizes = {"max_rows": 3, "max_burst": 4, "eos_token_ids": (1,)}
        self.pools = pools
        self.buffers = allocate_buffers(pools, **sizes, device=torch.device("cpu"))
        self.starts = []

    def run(self, bucket, num_steps):
        tables = {name: table.tolist() for name, table in self.buffers.block_tables.items()}
        self.starts.append((self.buffers.positions.tolist(), int(self.buffers.step), tables))
        for _ in range(num_steps):
            advance(self.buffers, torch.ones(bucket, dtype=torch.int64), torch.zeros(bucket))
        assert (self.buffers.positions[:bucket] > 0).all(), "a row ended"

    def time(self, **changes):
        asked = {"bucket": 2, "context": 21, "num_steps": 4, "num_bursts": 3} | changes
        asked |= {"vocab_size": 97, "max_positions": 256}
        return time_decode_steps(self, self.buffers, **asked)


@pytest.fixture
def runner():
    return RecordingRunner(
        full_attention=make_pool((1,), 3, 4), sliding_attention=make_pool((0, 2, 3), 1, 2, window=12)
    )


def test_rows_have_pages_of_their_own_around_the_context(runner):
    """Every burst starts at the same place, and no trash is touched."""
    seconds = runner.time()
    assert len(seconds) == 3
    assert all(value > 0 for value in seconds)
    assert len(runner.starts) == 4
    for positions, step, tables in runner.starts:
        # Steps at 18 to 21 attend to 19 to 22 tokens; the row beyond the bucket is inactive.
        assert (positions, step) == ([18, 18, -1], 0)
        # Three pages of a full layer, and the two of the ring, from the third sector on.
        assert tables["full_attention"] == [[12, 14, 16, 6], [18, 20, 22, 6], [6] * 4]
        assert tables["sliding_attention"] == [[24, 30], [36, 42], [6] * 2]
    full, sliding = runner.pools["full_attention"], runner.pools["sliding_attention"]
    for pool in (full, sliding):
        assert not pool.pages[: 2 * pool.trash_page].any()
    assert full.pages[12:24].all()
    assert not full.pages[24:].any()
    # Two sectors went to the full layers: the ring's pages begin in the fifth.
    assert not sliding.pages[:24].any()
    with pytest.raises(EngineError, match="a row of 42 tokens takes 6 blocks, and the block table holds 4"):
        runner.time(context=41)


def test_buffers_come_back_as_they_were_also_after_an_error(runner, monkeypatch):
    buffers = runner.buffers
    buffers.best_logits.fill_(2.5)
    buffers.positions[1], buffers.token_ids[1] = 7, 5
    tensors = [*buffers.state(), buffers.eos_ids, *buffers.block_tables.values()]
    before = [tensor.clone() for tensor in tensors]
    runner.time()
    assert all(map(torch.equal, tensors, before))
    monkeypatch.setattr(runner, "run", None)
    with pytest.raises(TypeError):
        runner.time()
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_driver_gives_the_same_tokens_before_and_after(family, shared_model, make_prompts, make_driver):
    driver = make_driver(shared_model(family), num_blocks=28, max_burst=8, max_requests_per_batch=4)
    before = drive(driver, make_prompts((5, 17, 40)))
    seconds = driver.time_decode_steps(batch=4, context=50, num_steps=8, num_bursts=2)
    assert len(seconds) == 2
    assert all(value > 0 for value in seconds)
    assert drive(driver, make_prompts((5, 17, 40))) == before
    for asked, message in (
        ({"batch": 3, "context": 50}, "batch=3 is no batch size of this engine: 1, 2, 4"),
        ({"batch": 4, "context": 50, "num_steps": 9}, "num_steps=9 must be from 1 to 8"),
        ({"batch": 1, "context": 254}, "takes 257 positions, and the model has 256"),
        ({"batch": 4, "context": 220}, "4 rows of .* do not fit in the cache"),
    ):
        with pytest.raises(EngineError, match=message):
            driver.time_decode_steps(**({"num_steps": 8} | asked))
    for name in ("batch", "context", "num_steps", "num_bursts"):
        for value, error in ((0, ValueError), (1.0, TypeError)):
            asked = {"batch": 1, "context": 4, "num_steps": 4} | {name: value}
            with pytest.raises(error, match=f"^{name}={value}"):
                driver.time_decode_steps(**asked)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "set num_blocks"), ({"attn_implementation": "sdpa", "num_blocks": 20}, "='cbexp' only")],
)
def test_a_driver_that_has_no_steps_to_time_says_so(shared_model, make_driver, settings, message):
    driver = make_driver(shared_model("qwen3"), **settings)
    with pytest.raises(EngineError, match=message):
        driver.time_decode_steps(batch=1, context=4, num_steps=4)


# The device's waiting


@dataclass
class Event:
    at_ms: float
    is_over: bool = True

    def query(self):
        return self.is_over

    def elapsed_time(self, end_event):
        assert self.is_over and end_event.is_over
        return end_event.at_ms - self.at_ms


def test_time_between_spans_is_idle_but_for_that_between_drives():
    idle, late = DeviceIdle(), Event(290, is_over=False)
    assert idle.share is None
    idle.begin()
    idle.add(Event(100), Event(190))
    assert idle.share == 0
    # A span that still runs is counted later, in its place.
    idle.add(Event(195), late)
    idle.begin()
    idle.add(Event(1000), Event(1005))
    idle.add(Event(1010), Event(1010))
    assert idle.share == 0
    late.is_over = True
    assert idle.share == pytest.approx((5 + 5) / ((5 + 90 + 95) + (5 + 5)))
