"""Errors and interrupts: they reach the caller, what was done is kept, and the next round works."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbexp.engine.types import CacheMemoryError
from tests.drivers.conftest import drive, ids_of

LONG = 100


@contextmanager
def hooked_forward(model, hook):
    handle = model.model.register_forward_pre_hook(lambda module, args: hook())
    yield
    handle.remove()


def failing_after(number, error):
    calls = iter(range(number))

    def fail():
        if next(calls, None) is None:
            raise error

    return fail


def test_an_error_on_the_way_reaches_the_caller_and_keeps_what_was_done(
    make_driver, qwen3, prompts, generate_alone
):
    expected = [generate_alone(qwen3, prompt, 8) for prompt in prompts]
    driver = make_driver(qwen3)
    ids = driver.add_requests(prompts, max_new_tokens=[2, 8, 8, 8, 8, 8])
    failing = failing_after(4, RuntimeError("the card is on fire"))
    with hooked_forward(qwen3, failing), pytest.raises(RuntimeError, match="the card is on fire"):
        driver.drive_until_empty()
    partial = driver.partial_completions
    assert list(partial) == ids
    assert partial[ids[0]].finish_reason == "length"
    assert partial[ids[0]].completion_ids == expected[0][:2]
    for request_id, tokens in zip(ids[1:], expected[1:], strict=True):
        assert partial[request_id].finish_reason == "failed"
        assert "the card is on fire" in partial[request_id].error
        seen = partial[request_id].completion_ids
        assert 3 <= len(seen) <= 4
        assert seen == tokens[: len(seen)]
    assert ids_of(drive(driver, prompts)) == expected
    assert driver.partial_completions == {}


def test_ctrl_c_stops_a_round(make_driver, qwen3, prompts, generate_alone):
    driver = make_driver(qwen3)
    driver.warmup()
    driver.add_requests(prompts[:2], max_new_tokens=[1, LONG])
    num_threads = threading.active_count()
    timer = threading.Timer(0.4, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with hooked_forward(qwen3, lambda: time.sleep(0.05)), pytest.raises(KeyboardInterrupt):
        driver.drive_until_empty()
    timer.join()
    assert threading.active_count() <= num_threads
    done, cut = driver.partial_completions.values()
    assert done.finish_reason == "length"
    assert (cut.finish_reason, cut.error) == ("failed", "KeyboardInterrupt: ")
    assert 0 < len(cut) < LONG
    assert cut.completion_ids == generate_alone(qwen3, prompts[1], len(cut))
    assert ids_of(drive(driver, prompts[:1])) == [generate_alone(qwen3, prompts[0], 8)]


def test_a_request_that_upstream_fails_is_failed_and_the_others_are_not(
    make_manager, qwen3, prompts, generate_alone, monkeypatch
):
    driver = make_manager(qwen3)
    driver.warmup()
    scheduler = driver._session._processor.scheduler
    add = scheduler.add_waiting_request

    def refuse_one(state):
        if state.request_id == "req_1":
            raise RuntimeError("no room for req_1")
        add(state)

    monkeypatch.setattr(scheduler, "add_waiting_request", refuse_one)
    first, failed, last = drive(driver, prompts[:3])
    assert (failed.finish_reason, failed.completion_ids, failed.error) == ("failed", (), "no room for req_1")
    assert ids_of([first, last]) == [generate_alone(qwen3, prompt, 8) for prompt in prompts[:3:2]]


def test_a_cache_that_does_not_fit_says_what_to_lower(make_manager, qwen3):
    driver = make_manager(qwen3, num_blocks=10**10)
    with pytest.raises(CacheMemoryError, match=r"10000000000 blocks of 16 tokens.*lower num_blocks"):
        driver.warmup()
    assert qwen3.config._attn_implementation == "sdpa"


SCRIPT = """
import sys, torch
from cbexp.drivers.generate import GenerateDriver
from cbexp.drivers.manager import ManagerDriver
from transformers import Qwen3Config, Qwen3ForCausalLM
from tests.drivers.conftest import build_model, make_config

model = build_model(Qwen3ForCausalLM, Qwen3Config)
config = make_config(allow_block_sharing=True)
drivers = [GenerateDriver(model, config), ManagerDriver(model, config), ManagerDriver(model, config)]
for driver in drivers:
    driver.add_requests([[1, 2], [3]], num_generations=2)
    print(len(driver.drive_until_empty()))
dropped = ManagerDriver(model, config)
dropped.warmup()
del dropped
drivers[1].add_requests([[1, 2]])
print("end", flush=True)
sys.exit(3)
"""


def test_a_script_that_closes_no_driver_and_leaves_requests_queued():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,  # upstream's thread, not stopped, would keep the process for ever
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, ["4", "4", "4", "end"], "")
