"""Errors and interrupts in a drive: they reach the caller, nothing made is lost, and the next round is right."""

import signal

import pytest
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from cbexp.engine import EngineError
from cbexp.engine.buffers import RowUpload
from cbexp.engine.decode import Decoder
from cbexp.engine.decode.step import EagerSteps
from cbexp.engine.driver import _Engine
from cbexp.engine.requests import RequestBook
from cbexp.engine.upstream import Batcher
from tests.engine.driving import check_cache_at_rest, drive


class BoomError(Exception):
    pass


@pytest.fixture
def model(new_model):
    return new_model("qwen3")


@pytest.fixture
def expected(prompts, references):
    return references("qwen3", prompts)


def raise_at(step):
    def on_step(index, info):
        if index == step:
            raise BoomError("stop here")

    return on_step


def drive_and_fail(driver, prompts, error=BoomError, **kwargs):
    """The completions that are there after the error."""
    request_ids = driver.add_requests(prompts, **kwargs)
    with pytest.raises(error):
        driver.drive_until_empty()
    assert list(driver.partial_completions) == request_ids
    check_cache_at_rest(driver)
    return list(driver.partial_completions.values())


def check_starts(partial, expected):
    for completion, tokens in zip(partial, expected, strict=True):
        assert completion.completion_ids == tokens[: len(completion)]


def check_next_round(driver, prompts, expected):
    assert drive(driver, prompts) == expected
    assert driver.partial_completions == {}


# An error in any place


def nothing(original, args): ...


def all_of_it(original, args):
    original(*args)


def half_a_burst(original, args):
    steps, bucket, num_steps = args
    original(steps, bucket, num_steps // 2)


def ctrl_c(original, args):
    signal.raise_signal(signal.SIGINT)


# What fails, in which call, what of the call is done before; and the tokens that seven requests have by then when there
# is room. Six make one with the first batch of prompts and one with the second, then all of them 4, 4 and 3 in bursts.
PLACES = {
    "submitting": (Batcher, "submit", 2, nothing, 0),
    "taking the model over": (Decoder, "begin", 1, nothing, 0),
    "scheduling a batch": (ContinuousBatchProcessor, "prepare_next_batch", 2, all_of_it, 6),
    "the forward of prompts": (Batcher, "_run_forward", 2, nothing, 6),
    "updating a batch": (ContinuousBatchProcessor, "update_batch", 2, all_of_it, 7),
    "rows on their way up": (RowUpload, "upload", 2, nothing, 7 * 5),
    "half a burst": (EagerSteps, "run", 2, half_a_burst, 7 * 5),
    "Ctrl-C in a step": (EagerSteps, "step", 6, ctrl_c, 7 * 5),
    "tokens on their way down": (Decoder, "run", 2, all_of_it, 7 * 5),
    "requests that have their tokens": (Batcher, "_account_for_tokens", 7 + 3, all_of_it, 7 * 5 + 3 * 4),
    "a burst that is accounted for": (RequestBook, "mark_tokens", 4, nothing, 7 * 9),
    "the last burst": (RequestBook, "mark_tokens", 5, nothing, 7 * 12),
    "outcomes": (RequestBook, "finish", 3, nothing, 7 * 12),
}


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_leaves_the_driver_usable(
    make_driver, model, prompts, references, place, is_crowded, monkeypatch
):
    owner, name, number, before, num_tokens = PLACES[place]
    num_generations = 2 if is_crowded else 1
    settings = {"num_blocks": 24} if is_crowded else {"num_blocks": 64, "max_batch_tokens": 100}
    driver = make_driver(model, max_burst=4, **settings)
    original, calls = getattr(owner, name), []

    def failing(*args):
        calls.append(1)
        if len(calls) == number:
            before(original, args)
            raise BoomError
        return original(*args)

    expected = references("qwen3", prompts, num_generations=num_generations)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        error = KeyboardInterrupt if before is ctrl_c else BoomError
        partial = drive_and_fail(driver, prompts, error, num_generations=num_generations)
    assert len(calls) == number
    check_starts(partial, expected)
    assert is_crowded or sum(map(len, partial)) == num_tokens
    for completion in partial:
        is_unfinished = completion.finish_reason == "failed"
        assert (completion.error is not None) is (completion.timings.finished_s is None) is is_unfinished
    assert drive(driver, prompts, num_generations=num_generations) == expected
    assert driver.partial_completions == {}


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 64}], ids=["growing", "fixed"])
def test_an_error_in_on_step(make_driver, model, prompts, expected, settings):
    driver = make_driver(model, on_step=raise_at(4), max_burst=1, **settings)
    partial = drive_and_fail(driver, prompts)
    assert [c.completion_ids for c in partial] == [tokens[:5] for tokens in expected]
    assert {(c.finish_reason, c.error) for c in partial} == {("failed", "BoomError: stop here")}
    assert len(driver.steps) == 5
    check_next_round(driver, prompts, expected)


def test_finished_requests_survive_an_error(make_driver, model, prompts, references):
    driver = make_driver(model, on_step=raise_at(6), max_burst=1)
    limits = [2, 12, 4, 12, 12, 12, 12]
    partial = drive_and_fail(driver, prompts, max_new_tokens=limits)
    assert [c.finish_reason for c in partial] == ["length" if limit < 7 else "failed" for limit in limits]
    assert [c.completion_ids for c in partial] == references("qwen3", prompts, [min(n, 7) for n in limits])
    assert [c.error is None for c in partial] == [limit < 7 for limit in limits]


def test_evicted_requests_keep_their_tokens_in_an_error(make_driver, model, prompts, expected):
    num_waiting = []

    def stop_at_eviction(index, info):
        num_waiting.append(info.num_waiting)
        if index > 0 and num_waiting[-1] > num_waiting[-2]:
            raise BoomError

    partial = drive_and_fail(make_driver(model, num_blocks=20, on_step=stop_at_eviction), prompts)
    check_starts(partial, expected)
    assert sum(len(completion) == 0 for completion in partial) == num_waiting[-2]


def test_completions_survive_an_interrupt_after_the_last_step(
    make_driver, model, prompts, expected, monkeypatch
):
    """It takes effect once the model is the caller's again."""
    driver = make_driver(model.train(), num_blocks=64)

    def reset(engine, original=_Engine.reset):
        signal.raise_signal(signal.SIGINT)
        original(engine)

    with monkeypatch.context() as patch:
        patch.setattr(_Engine, "reset", reset)
        partial = drive_and_fail(driver, prompts, KeyboardInterrupt)
    assert [c.completion_ids for c in partial] == expected
    assert all(module.training for module in model.modules())
    check_next_round(driver, prompts, expected)


@pytest.mark.parametrize("kind", ["interrupt", "error"])
def test_what_close_did_not_get_to_is_done_in_the_end(make_driver, model, prompts, monkeypatch, kind):
    """By the same call after Ctrl-C, by the next one after an error."""
    driver = make_driver(model)
    drive(driver, prompts)
    original, calls = Decoder.close, []

    def close(decoder):
        calls.append(1)
        if len(calls) == 1:
            if kind == "error":
                raise MemoryError
            signal.raise_signal(signal.SIGINT)
        original(decoder)

    monkeypatch.setattr(Decoder, "close", close)
    with pytest.raises(KeyboardInterrupt if kind == "interrupt" else MemoryError):
        driver.close()
    assert (driver._engine is None) is (kind == "interrupt")
    driver.close()
    assert driver._engine is None


# Requests that fail on their own


def test_a_request_that_the_scheduler_loses_is_failed(make_driver, model, prompts, expected, monkeypatch):
    def submit_and_lose_second(batcher, group, original=Batcher.submit):
        original(batcher, group)
        if group.request_ids[0] == "req_1":
            del batcher._scheduler.waiting_requests["req_1"]
            batcher._scheduler.waiting_requests_order.remove("req_1")

    driver = make_driver(model)
    monkeypatch.setattr(Batcher, "submit", submit_and_lose_second)
    request_ids = driver.add_requests(prompts)
    completions = driver.drive_until_empty()
    assert list(completions) == request_ids
    lost = completions.pop("req_1")
    assert (lost.finish_reason, lost.completion_ids, lost.timings.scheduled_s) == ("failed", (), None)
    assert "lost the request" in lost.error
    assert [c.completion_ids for c in completions.values()] == expected[:1] + expected[2:]


def test_a_request_that_upstream_fails_is_returned_with_its_error(make_driver, model, prompts, expected):
    def fail_second(index, info):
        if index == 3:
            processor = driver._engine.batcher._processor
            state = processor.scheduler.active_requests["req_1"]
            processor._handle_request_error(BoomError("out of luck"), state)
            processor.scheduler.finish_request("req_1")

    driver = make_driver(model, on_step=fail_second, max_burst=1)
    driver.add_requests(prompts)
    completions = list(driver.drive_until_empty().values())
    failed = completions.pop(1)
    assert (failed.finish_reason, failed.error, failed.completion_ids) == (
        "failed",
        "out of luck",
        expected[1][:4],
    )
    assert [c.completion_ids for c in completions] == expected[:1] + expected[2:]


def test_a_cache_that_cannot_be_built_fails_the_round_alone(
    make_driver, model, prompts, expected, monkeypatch
):
    driver = make_driver(model)
    with monkeypatch.context() as patch:
        patch.setattr("cbexp.engine.upstream.build.MAX_MEMORY_FRACTION", 0.0)
        partial = drive_and_fail(driver, prompts, MemoryError)
    assert {c.completion_ids for c in partial} == {()}
    check_next_round(driver, prompts, expected)


# Calls at the wrong time

CALLS = {
    "add_requests": lambda driver: driver.add_requests([[1]]),
    "drive_until_empty": lambda driver: driver.drive_until_empty(),
    "warmup": lambda driver: driver.warmup(),
    "time_decode_steps": lambda driver: driver.time_decode_steps(1, 4, 4),
    "close": lambda driver: driver.close(),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_drive_cannot_be_entered_twice(make_driver, model, prompts, expected, method):
    def call(index, info):
        if index == 2:
            CALLS[method](driver)

    driver = make_driver(model, max_burst=1, on_step=call)
    driver.add_requests(prompts)
    with pytest.raises(EngineError, match=rf"{method}\(\) was called inside a drive"):
        driver.drive_until_empty()
    check_next_round(driver, prompts, expected)


@pytest.mark.parametrize("method", CALLS)
def test_a_closed_driver_says_so(make_driver, model, method):
    driver = make_driver(model)
    with driver:
        driver.warmup()
    driver.close()
    if method != "close":
        with pytest.raises(EngineError, match=rf"{method}\(\) was called on a closed SyncCBDriver"):
            CALLS[method](driver)
