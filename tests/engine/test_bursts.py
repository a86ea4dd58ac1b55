"""Bursts: their number, shapes and limits, what they may write, and what becomes of them in an error."""

from __future__ import annotations

import math

import pytest
import torch

from cbexp.engine.burst import BurstRunner
from cbexp.engine.burst_length import ADMISSION_BURST, MIN_BURST, TAIL_BURST_ON_CPU
from cbexp.engine.burst_step import BurstStep
from cbexp.engine.paged_engine import PagedEngine
from cbexp.engine.step_loop import StepLoop
from tests.engine.driving import drive

SHAPES = ("natural", "buckets", "full")


def kinds(driver):
    return [(step.kind, step.num_requests, step.num_steps) for step in driver.steps]


@pytest.fixture(params=SHAPES)
def batch_shape(request):
    return request.param


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("max_burst", [1, 5, 128])
def test_a_stream_equals_generate(
    shared_model, make_driver, prompts, reference, family, batch_shape, max_burst
):
    """Admission, chunks, limits and batch sizes between buckets, all at once."""
    limits = [30, 1, 17, 2, 30, 9, 25]
    driver = make_driver(
        shared_model(family),
        max_batch_tokens=24,
        max_requests_per_batch=5,
        batch_shape=batch_shape,
        max_burst=max_burst,
        num_blocks=100,
    )
    expected = [reference(family, prompt, 30)[:limit] for prompt, limit in zip(prompts, limits, strict=True)]
    for _ in range(2):
        assert drive(driver, prompts, max_new_tokens=limits) == expected
    assert {step.kind for step in driver.steps} == {"prefill", "decode"}
    assert max(step.num_steps for step in driver.steps) == min(max_burst, 29)


def test_bursts_are_as_many_as_predicted(shared_model, make_driver, make_prompts):
    """Ten requests of 100 tokens for four rows: three waves, each read at once and then decoded without a stop."""
    driver = make_driver(shared_model("qwen3"), max_requests_per_batch=4, num_blocks=200, max_new_tokens=100)
    drive(driver, make_prompts((10,) * 10))
    assert kinds(driver) == [
        ("prefill", 4, 1),
        ("decode", 4, 99),
        ("prefill", 4, 1),
        ("decode", 4, 99),
        ("prefill", 2, 1),
        ("decode", 2, 99),
    ]
    assert sum(step.num_padding for step in driver.steps) == 0


def test_with_an_eos_the_host_looks_more_often(shared_model, make_driver, make_prompts, reference):
    """While requests wait, to let others in; in the tail, to shrink the batch."""
    prompts = make_prompts((10,) * 6)
    unused = next(t for t in range(97) if all(t not in reference("qwen3", p, 150) for p in prompts))
    driver = make_driver(
        shared_model("qwen3"),
        max_requests_per_batch=4,
        num_blocks=200,
        max_new_tokens=150,
        eos_token_id=unused,
    )
    assert drive(driver, prompts) == [reference("qwen3", p, 150) for p in prompts]
    waiting, tail = math.ceil(149 / ADMISSION_BURST), math.ceil(149 / TAIL_BURST_ON_CPU)
    steps = [step for step in driver.steps if step.kind == "decode"]
    assert len(steps) == waiting + tail
    assert [step.num_steps for step in steps[:2]] == [ADMISSION_BURST] * 2
    assert steps[waiting].num_steps == TAIL_BURST_ON_CPU


def test_a_row_that_ends_early_idles_and_the_batch_shrinks(shared_model, make_driver, make_prompts):
    driver = make_driver(shared_model("qwen3"), num_blocks=100, max_requests_per_batch=4)
    drive(driver, make_prompts((9, 9, 9)), max_new_tokens=[41, 11, 21])
    # Three rows compute four; the first end leaves two.
    assert [(s.num_steps, s.bucket, s.num_tokens, s.num_padding) for s in driver.steps[1:]] == [
        (10, 4, 30, 10),
        (10, 2, 20, 0),
        (20, 1, 20, 0),
    ]
    assert [step.num_finished for step in driver.steps] == [0, 1, 1, 1]


def test_the_longest_rows_come_first(shared_model, make_driver, make_prompts, monkeypatch):
    """Attention starts its programs in that order, and a long one begun last would run on alone."""
    positions = []
    original = BurstRunner.submit

    def submit(runner, rows, num_steps):
        positions.append([row.position for row in rows])
        return original(runner, rows, num_steps)

    monkeypatch.setattr(BurstRunner, "submit", submit)
    driver = make_driver(shared_model("qwen3"), num_blocks=100, max_requests_per_batch=4)
    drive(driver, make_prompts((3, 9, 5, 7)), max_new_tokens=6)
    assert positions[-1] == [9, 7, 5, 3]


def test_an_eos_ends_a_row_on_the_device(shared_model, make_driver, prompts, reference):
    full = reference("qwen3", prompts[5], 40)
    eos = next(token for token in full[5:] if token not in full[:5])
    driver = make_driver(shared_model("qwen3"), eos_token_id=eos, max_new_tokens=40, num_blocks=64)
    assert drive(driver, prompts) == [reference("qwen3", prompt, 40, (eos,)) for prompt in prompts]
    decode = driver.steps[1]
    assert decode.num_padding == decode.bucket * decode.num_steps - decode.num_tokens > decode.num_steps


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("allow_block_sharing", [False, True])
def test_forks_under_pressure(
    shared_model, make_driver, make_prompts, reference, family, allow_block_sharing
):
    """Forks decode at once; some are evicted, read again, and their blocks shared, replaced and copied."""
    prompts = make_prompts((33, 9, 16, 41), seed=3)
    settings = {"allow_block_sharing": allow_block_sharing, "max_new_tokens": 40}
    roomy = make_driver(shared_model(family), **settings)
    expected = [reference(family, prompt, 40) for prompt in prompts for _ in range(4)]
    assert drive(roomy, prompts, num_generations=4) == expected
    assert kinds(roomy) == [("prefill", 4, 1), ("decode", 16, 40)]
    taken = roomy.resolved["num_blocks"] * max(step.cache_used_fraction for step in roomy.steps)
    crowded = make_driver(shared_model(family), **settings, num_blocks=int(0.6 * taken))
    for _ in range(2):
        assert drive(crowded, prompts, num_generations=4) == expected


def test_a_crowded_cache_shortens_bursts_before_it_evicts(shared_model, make_driver, make_prompts, reference):
    """0.6 of the blocks that all need at full length: every request comes through, most steps still in bursts."""
    prompts = make_prompts((8,) * 6)
    driver = make_driver(shared_model("qwen3"), max_new_tokens=57, num_blocks=int(0.6 * 6 * 8))
    assert drive(driver, prompts) == [reference("qwen3", prompt, 57) for prompt in prompts]
    bursts = [step for step in driver.steps if step.bucket is not None]
    assert sum(step.num_steps for step in bursts) > 5 * len(bursts)
    assert any(step.bucket is None and step.kind == "decode" for step in driver.steps), "nobody was evicted"
    assert max(step.num_waiting for step in driver.steps[1:]) > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_padding_writes_nothing_that_lives(shared_model, make_driver, prompts, family, monkeypatch):
    """With and without rows of padding, and rows that have ended, the cache ends the same but for the trash."""
    caches = []

    def reset(engine, original=PagedEngine.reset):
        first_block = 2 * engine._cache.bytes_per_sector
        caches.append(engine._cache.cache_tensor[first_block:].view(torch.float32).clone())
        assert not engine.read_trash.any()
        original(engine)

    monkeypatch.setattr(PagedEngine, "reset", reset)
    tokens = []
    for shape in SHAPES:
        # Bursts of one length whatever the shape, so that blocks are given out in one order.
        driver = make_driver(
            shared_model(family),
            batch_shape=shape,
            num_blocks=80,
            max_requests_per_batch=16,
            max_burst=MIN_BURST,
        )
        tokens.append(drive(driver, prompts, max_new_tokens=[20, 3, 20, 9, 1, 20, 14]))
    assert tokens[0] == tokens[1] == tokens[2]
    assert driver.steps[-1].bucket == 16
    # A larger batch may sum in another order.
    torch.testing.assert_close(caches[1], caches[0])
    torch.testing.assert_close(caches[2], caches[0])
    assert caches[0].any()


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_nan_in_one_request_stays_there(new_model, make_driver, greedy, family, batch_shape):
    """The poisoned rows decode beside the others, and pages of theirs are used again afterwards."""
    model = new_model(family)
    poison = 96
    prompts = [[1, 2, 3, 4, 5], [6, poison, 7], [8] * 12, [9, 10, poison], [11, 12]]
    clean = [index for index, prompt in enumerate(prompts) if poison not in prompt]
    expected = [greedy(model, prompts[index], 20) for index in clean]
    assert not any(poison in tokens for tokens in expected)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = math.nan
    driver = make_driver(model, max_new_tokens=20, num_blocks=24, batch_shape=batch_shape)
    # Pages are given out in the order of the prompts.
    for order in ((0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (4, 2, 0, 3, 1)):
        completions = drive(driver, [prompts[index] for index in order])
        assert [completions[order.index(index)] for index in clean] == expected
        assert [len(tokens) for tokens in completions] == [20] * 5
    assert drive(driver, [prompts[index] for index in clean]) == expected


class BoomError(Exception):
    pass


@pytest.mark.parametrize("where", ["run", "collect", "submit"])
def test_an_error_in_a_burst(shared_model, make_driver, prompts, reference, batch_shape, where, monkeypatch):
    """In the second burst: tokens of the first are kept, and the next round is as if nothing had been."""
    driver = make_driver(
        shared_model("qwen3"), max_new_tokens=30, max_burst=10, num_blocks=64, batch_shape=batch_shape
    )
    owner = StepLoop if where == "run" else BurstRunner
    original, calls = getattr(owner, where), []

    def fail_in_second(self, *args):
        calls.append(1)
        if len(calls) == 2:
            if where == "run":
                original(self, args[0], 4)  # half of the burst has run
            raise BoomError
        return original(self, *args)

    monkeypatch.setattr(owner, where, fail_in_second)
    expected = [reference("qwen3", prompt, 30) for prompt in prompts]
    driver.add_requests(prompts)
    with pytest.raises(BoomError):
        driver.drive_until_empty()
    partial = list(driver.partial_completions.values())
    assert [c.completion_ids for c in partial] == [tokens[:11] for tokens in expected]
    assert {c.finish_reason for c in partial} == {"failed"}
    assert driver._slot._engine.num_referenced_blocks == 0
    assert drive(driver, prompts) == expected


def test_completions_that_a_burst_has_ended_survive_an_interrupt(
    shared_model, make_driver, prompts, reference, monkeypatch
):
    """Between the last row's account and the driver's book: not recorded yet, but not lost either."""
    driver = make_driver(shared_model("qwen3"), num_blocks=64)
    original = BurstStep.account

    def account_and_fail(burst, cache, scheduler):
        original(burst, cache, scheduler)
        raise KeyboardInterrupt

    monkeypatch.setattr(BurstStep, "account", account_and_fail)
    driver.add_requests(prompts)
    with pytest.raises(KeyboardInterrupt):
        driver.drive_until_empty()
    partial = [c.completion_ids for c in driver.partial_completions.values()]
    assert partial == [reference("qwen3", prompt, 12) for prompt in prompts]


def test_warmup_prepares_every_size_once_the_largest_first(shared_model, make_driver, prompts, monkeypatch):
    prepared = []
    monkeypatch.setattr(StepLoop, "_make_ready", lambda self, bucket: prepared.append(bucket))
    driver = make_driver(shared_model("qwen3"), num_blocks=64, max_requests_per_batch=6)
    prepared.clear()  # of the probe
    driver.warmup()
    assert prepared == [6, 4, 2, 1]
    drive(driver, prompts)
    driver.warmup()
    assert prepared == [6, 4, 2, 1]


def test_without_warmup_a_size_is_prepared_when_it_comes(shared_model, make_driver, prompts, monkeypatch):
    prepared = []
    monkeypatch.setattr(StepLoop, "_make_ready", lambda self, bucket: prepared.append(bucket))
    driver = make_driver(shared_model("qwen3"), max_requests_per_batch=4)
    prepared.clear()
    driver.warmup()
    assert prepared == []
    drive(driver, prompts[:3], max_new_tokens=[20, 5, 30])
    assert prepared == [4, 2, 1]
