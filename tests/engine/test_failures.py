"""Errors and interrupts in a drive: they reach the caller, nothing made is lost, and the next round is right."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from cbexp.engine import EngineError
from cbexp.engine.paged_engine import PagedEngine

NUM_NEW = 12


class BoomError(Exception):
    pass


@pytest.fixture
def model(new_model):
    return new_model("qwen3")


@pytest.fixture
def expected(prompts, reference):
    return [reference("qwen3", prompt, NUM_NEW) for prompt in prompts]


def raise_at(step):
    def on_step(index, info):
        if index == step:
            raise BoomError("stop here")

    return on_step


def fail_forward_once(model, call):
    """Make the second layer's attention raise in its `call`-th call from now."""
    calls = []

    def hook(module, args, kwargs):
        calls.append(1)
        if len(calls) == call:
            raise BoomError("a layer failed")

    model.model.layers[1].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def check_next_round(driver, prompts, expected):
    request_ids = driver.add_requests(prompts)
    completions = driver.drive_until_empty()
    assert list(completions) == request_ids
    assert [c.completion_ids for c in completions.values()] == expected
    assert driver.partial_completions == {}


def check_partials(partial, request_ids, expected, num_tokens):
    assert list(partial) == request_ids
    for completion, tokens in zip(partial.values(), expected, strict=True):
        assert completion.finish_reason == "failed"
        assert completion.completion_ids == tokens[:num_tokens]
        assert completion.timings.finished_s is None


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 64}], ids=["growing", "fixed"])
def test_an_error_in_on_step_leaves_the_driver_usable(make_driver, model, prompts, expected, settings):
    driver = make_driver(model, on_step=raise_at(4), max_burst=1, **settings)
    request_ids = driver.add_requests(prompts)
    with pytest.raises(BoomError, match="stop here"):
        driver.drive_until_empty()
    check_partials(driver.partial_completions, request_ids, expected, num_tokens=5)
    assert all(c.error == "BoomError: stop here" for c in driver.partial_completions.values())
    assert len(driver.steps) == 5
    check_next_round(driver, prompts, expected)


def test_an_error_in_the_forward(make_driver, model, prompts, expected):
    driver = make_driver(model, num_blocks=64, max_burst=1)
    fail_forward_once(model, call=3)
    request_ids = driver.add_requests(prompts)
    with pytest.raises(BoomError, match="a layer failed"):
        driver.drive_until_empty()
    check_partials(driver.partial_completions, request_ids, expected, num_tokens=2)
    check_next_round(driver, prompts, expected)


@pytest.mark.parametrize("method", ["prepare_next_batch", "update_batch"])
def test_an_error_in_the_host_work_of_a_step(make_driver, model, prompts, expected, method, monkeypatch):
    """Half of the work is done when it strikes: requests are scheduled or blocks allocated, and nothing is undone."""
    driver = make_driver(model, num_blocks=24)
    processor = driver._slot._engine._processor
    original, calls = getattr(processor, method), []

    def fail_after_third():
        result = original()
        calls.append(1)
        if len(calls) == 3:
            raise BoomError("midway")
        return result

    monkeypatch.setattr(processor, method, fail_after_third)
    driver.add_requests(prompts, num_generations=2)
    with pytest.raises(BoomError, match="midway"):
        driver.drive_until_empty()
    assert len(driver.partial_completions) == 2 * len(prompts)
    for completion, tokens in zip(list(driver.partial_completions.values())[::2], expected, strict=True):
        assert completion.completion_ids == tokens[: len(completion)]
    check_next_round(driver, prompts, expected)


def test_finished_requests_survive_an_error(make_driver, model, prompts, expected):
    driver = make_driver(model, on_step=raise_at(6), max_burst=1)
    limits = [2, 12, 4, 12, 12, 12, 12]
    driver.add_requests(prompts, max_new_tokens=limits)
    with pytest.raises(BoomError):
        driver.drive_until_empty()
    partial = list(driver.partial_completions.values())
    reasons = ["length" if limit < 7 else "failed" for limit in limits]
    assert [c.finish_reason for c in partial] == reasons
    assert [c.completion_ids for c in partial] == [
        t[: min(n, 7)] for t, n in zip(expected, limits, strict=True)
    ]
    assert [c.error is None for c in partial] == [reason == "length" for reason in reasons]


def test_evicted_requests_keep_their_tokens_in_an_error(make_driver, model, prompts, expected):
    num_waiting = []

    def stop_at_eviction(index, info):
        num_waiting.append(info.num_waiting)
        if index > 0 and num_waiting[-1] > num_waiting[-2]:
            raise BoomError

    driver = make_driver(model, num_blocks=20, on_step=stop_at_eviction)
    driver.add_requests(prompts)
    with pytest.raises(BoomError):
        driver.drive_until_empty()
    for completion, tokens in zip(driver.partial_completions.values(), expected, strict=True):
        assert completion.completion_ids == tokens[: len(completion)]
    assert sum(len(c) == 0 for c in driver.partial_completions.values()) == num_waiting[-2]


def test_ctrl_c_stops_within_half_a_second(make_driver, new_model, make_prompts, reference):
    driver = make_driver(new_model("qwen3"), num_blocks=512, max_new_tokens=190, max_burst=8)
    prompts = make_prompts((40,) * 16)
    request_ids = driver.add_requests(prompts, max_new_tokens=[5] + [190] * 15)
    pressed = []

    def press():
        pressed.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(0.2, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        driver.drive_until_empty()
    stopped_s = time.perf_counter()
    timer.join()
    assert stopped_s - pressed[0] < 0.5
    partial = driver.partial_completions
    assert list(partial) == request_ids
    assert [c.finish_reason for c in partial.values()] == ["length"] + ["failed"] * 15
    for prompt, completion in zip(prompts, partial.values(), strict=True):
        assert 0 < len(completion) < 190
        assert completion.completion_ids == reference("qwen3", prompt, 190)[: len(completion)]
    check_next_round(driver, prompts[:2], [reference("qwen3", p, 190) for p in prompts[:2]])


def test_a_request_that_the_scheduler_loses_is_failed(make_driver, model, prompts, expected, monkeypatch):
    def submit_and_lose_second(engine, group, original=PagedEngine.submit):
        original(engine, group)
        if group.request_ids[0] == "req_1":
            del engine._scheduler.waiting_requests["req_1"]
            engine._scheduler.waiting_requests_order.remove("req_1")

    monkeypatch.setattr(PagedEngine, "submit", submit_and_lose_second)
    driver = make_driver(model)
    request_ids = driver.add_requests(prompts)
    completions = driver.drive_until_empty()
    assert list(completions) == request_ids
    lost = completions["req_1"]
    assert (lost.finish_reason, lost.completion_ids) == ("failed", ())
    assert "lost the request" in lost.error
    assert lost.timings.scheduled_s is None
    others = [c.completion_ids for c in completions.values() if c is not lost]
    assert others == expected[:1] + expected[2:]


def test_a_request_that_upstream_fails_is_returned_with_its_error(make_driver, model, prompts, expected):
    def fail_second(index, info):
        if index == 3:
            processor = driver._slot._engine._processor
            state = processor.scheduler.active_requests["req_1"]
            processor._handle_request_error(BoomError("out of luck"), state)
            processor.scheduler.finish_request("req_1")

    driver = make_driver(model, on_step=fail_second, max_burst=1)
    driver.add_requests(prompts)
    completions = list(driver.drive_until_empty().values())
    assert completions[1].finish_reason == "failed"
    assert completions[1].error == "out of luck"
    assert completions[1].completion_ids == expected[1][:4]
    assert [c.completion_ids for c in completions[2:]] == expected[2:]


def test_a_cache_that_cannot_be_built_fails_the_round_alone(
    make_driver, model, prompts, expected, monkeypatch
):
    driver = make_driver(model)
    request_ids = driver.add_requests(prompts)
    with monkeypatch.context() as patch:
        patch.setattr("cbexp.engine.cb_internals.MAX_MEMORY_FRACTION", 0.0)
        with pytest.raises(MemoryError):
            driver.drive_until_empty()
    check_partials(driver.partial_completions, request_ids, expected, num_tokens=0)
    check_next_round(driver, prompts, expected)


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("add_requests", lambda driver: driver.add_requests([[1]])),
        ("drive_until_empty", lambda driver: driver.drive_until_empty()),
        ("warmup", lambda driver: driver.warmup()),
        ("close", lambda driver: driver.close()),
    ],
)
def test_a_drive_cannot_be_entered_twice(make_driver, model, prompts, expected, method, call):
    driver = make_driver(model, max_burst=1, on_step=lambda index, info: call(driver) if index == 2 else None)
    driver.add_requests(prompts)
    with pytest.raises(EngineError, match=rf"{method}\(\) was called inside a drive"):
        driver.drive_until_empty()
    check_next_round(driver, prompts, expected)


@pytest.mark.parametrize("method", ["add_requests", "drive_until_empty", "warmup"])
def test_a_closed_driver_says_so(make_driver, model, method):
    driver = make_driver(model)
    with driver:
        driver.warmup()
    driver.close()
    with pytest.raises(EngineError, match=rf"{method}\(\) was called on a closed SyncCBDriver"):
        getattr(driver, method)(*([[[1]]] if method == "add_requests" else []))
