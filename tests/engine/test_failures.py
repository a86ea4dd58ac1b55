"""Errors and interrupts in a drive: they reach the caller, nothing made is lost, and the next round is right."""

import itertools
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
from cbexp.engine.upstream.admission import AdmissionControl
from tests.engine.driving import check_cache_at_rest, drive


class BoomError(Exception):
    pass


@pytest.fixture
def model(new_model):
    return new_model("qwen3")


@pytest.fixture
def expected(prompts, references):
    return references("qwen3", prompts)


def drive_and_fail(driver, prompts, error=BoomError, **kwargs):
    """The completions that are there after the error."""
    request_ids = driver.add_requests(prompts, **kwargs)
    with pytest.raises(error):
        driver.drive_until_empty()
    assert list(driver.partial_completions) == request_ids
    check_cache_at_rest(driver)
    return list(driver.partial_completions.values())


def check_next_round(driver, prompts, expected, **kwargs):
    assert drive(driver, prompts, **kwargs) == expected
    assert driver.partial_completions == {}


# An error in any place


def nothing(original, *args): ...


def all_of_it(original, *args):
    original(*args)


def half_a_burst(original, steps, bucket, num_steps):
    original(steps, bucket, num_steps // 2)


def ctrl_c(original, *args):
    signal.raise_signal(signal.SIGINT)


# What fails, in which call, what of the call is done before; and the tokens that seven requests have by then when there
# is room. Six make one with the first batch of prompts and one with the second, then all of them 4, 4 and 3 in bursts.
PLACES = {
    "submitting": (Batcher, "submit", 2, nothing, 0),
    "taking the model over": (Decoder, "begin", 1, nothing, 0),
    "scheduling beside rows that decode": (AdmissionControl, "_schedule_upstream", 2, nothing, 6),
    "the forward of prompts": (Batcher, "_run_forward", 2, nothing, 6),
    "updating a batch": (ContinuousBatchProcessor, "update_batch", 2, all_of_it, 7),
    "rows on their way up": (RowUpload, "upload", 2, nothing, 7 * 5),
    "half a burst": (EagerSteps, "run", 2, half_a_burst, 7 * 5),
    "Ctrl-C in a step": (EagerSteps, "step", 6, ctrl_c, 7 * 5),
    "tokens on their way down": (Decoder, "run", 2, all_of_it, 7 * 5),
    "requests that have their tokens": (Batcher, "_account_for_tokens", 7 + 3, all_of_it, 7 * 5 + 3 * 4),
    "the last burst": (RequestBook, "add_tokens", 7 + 7 + 7 + 2, nothing, 7 * 9 + 3),
    "outcomes": (RequestBook, "finish", 3, nothing, 7 * 9 + 3 * 3),
}


@pytest.mark.parametrize(
    ("place", "is_crowded"),
    [*((place, False) for place in PLACES), ("updating a batch", True), ("half a burst", True)],
)
def test_an_error_leaves_the_driver_usable(
    make_driver, model, prompts, references, place, is_crowded, monkeypatch
):
    owner, name, number, before, num_tokens = PLACES[place]
    num_generations = 2 if is_crowded else 1
    settings = {"num_blocks": 24} if is_crowded else {"num_blocks": 64, "max_batch_tokens": 100}
    driver = make_driver(model, max_burst=4, **settings)
    original, calls = getattr(owner, name), itertools.count(1)

    def failing(*args):
        if next(calls) == number:
            before(original, *args)
            raise BoomError
        return original(*args)

    expected = references("qwen3", prompts, num_generations=num_generations)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        error = KeyboardInterrupt if before is ctrl_c else BoomError
        partial = drive_and_fail(driver, prompts, error, num_generations=num_generations)
    assert is_crowded or sum(map(len, partial)) == num_tokens
    for completion, tokens in zip(partial, expected, strict=True):
        assert completion.completion_ids == tokens[: len(completion)]
        is_unfinished = completion.finish_reason == "failed"
        assert (completion.error is not None) is (completion.timings.finished_s is None) is is_unfinished
    check_next_round(driver, prompts, expected, num_generations=num_generations)


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 64}], ids=["growing", "fixed"])
def test_an_error_in_on_step(make_driver, model, prompts, expected, references, settings):
    """Who has finished by then stays finished."""

    def raise_at_6(index, info):
        if index == 6:
            raise BoomError("stop here")

    driver = make_driver(model, on_step=raise_at_6, max_burst=1, **settings)
    limits = [2, 12, 4, 12, 12, 12, 12]
    partial = drive_and_fail(driver, prompts, max_new_tokens=limits)
    assert [c.completion_ids for c in partial] == references("qwen3", prompts, [min(n, 7) for n in limits])
    ends = [("length", None) if limit < 7 else ("failed", "BoomError: stop here") for limit in limits]
    assert [(c.finish_reason, c.error) for c in partial] == ends
    assert len(driver.steps) == 7
    check_next_round(driver, prompts, expected)


def test_evicted_requests_keep_their_tokens_in_an_error(make_driver, model, prompts, expected):
    num_waiting = []

    def stop_at_eviction(index, info):
        num_waiting.append(info.num_waiting)
        if index > 0 and num_waiting[-1] > num_waiting[-2]:
            raise BoomError

    partial = drive_and_fail(make_driver(model, num_blocks=20, on_step=stop_at_eviction), prompts)
    for completion, tokens in zip(partial, expected, strict=True):
        assert completion.completion_ids == tokens[: len(completion)]
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


def test_what_close_did_not_get_to_before_ctrl_c_is_done_in_the_end(make_driver, model, prompts, monkeypatch):
    driver = make_driver(model)
    drive(driver, prompts)

    def close(decoder, original=Decoder.close):
        signal.raise_signal(signal.SIGINT)
        original(decoder)

    monkeypatch.setattr(Decoder, "close", close)
    with pytest.raises(KeyboardInterrupt):
        driver.close()
    assert driver._engine is None
    driver.close()


# Requests that fail on their own


def test_a_request_that_upstream_loses_or_fails_is_returned_with_its_error(
    make_driver, model, prompts, expected, monkeypatch
):
    def submit_and_lose_second(batcher, group, original=Batcher.submit):
        original(batcher, group)
        if group.request_ids[0] == "req_1":
            del batcher._scheduler.waiting_requests["req_1"]
            batcher._scheduler.waiting_requests_order.remove("req_1")

    def fail_third(index, info):
        if index == 3:
            processor = driver._engine.batcher._processor
            state = processor.scheduler.active_requests["req_2"]
            processor._handle_request_error(BoomError("out of luck"), state)
            processor.scheduler.finish_request("req_2")

    driver = make_driver(model, on_step=fail_third, max_burst=1)
    monkeypatch.setattr(Batcher, "submit", submit_and_lose_second)
    driver.add_requests(prompts)
    first, lost, failed, *others = driver.drive_until_empty().values()
    assert [c.completion_ids for c in (first, *others)] == expected[:1] + expected[3:]
    assert (lost.finish_reason, lost.completion_ids, lost.timings.scheduled_s) == ("failed", (), None)
    assert "lost the request" in lost.error
    assert (failed.finish_reason, failed.error) == ("failed", "out of luck")
    assert failed.completion_ids == expected[2][:4]


def test_a_cache_that_cannot_be_built_fails_the_round_alone(
    make_driver, model, prompts, expected, monkeypatch
):
    with pytest.raises(MemoryError, match="lower num_blocks, max_batch_tokens or max_requests_per_batch"):
        make_driver(model, num_blocks=10**9)
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


def test_calls_inside_a_drive_and_on_a_closed_driver_are_refused(make_driver, model, prompts, expected):
    def call_all(index, info):
        for method, call in CALLS.items():
            with pytest.raises(EngineError, match=rf"{method}\(\) was called inside a drive"):
                call(driver)

    driver = make_driver(model, max_burst=4, on_step=call_all)
    with driver:
        check_next_round(driver, prompts, expected)
    driver.close()
    for method, call in CALLS.items():
        if method != "close":
            with pytest.raises(EngineError, match=rf"{method}\(\) was called on a closed SyncCBDriver"):
                call(driver)
