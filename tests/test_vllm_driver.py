"""Rounds through vLLM's worker: completions, limits, times, and what becomes of a vLLM that misbehaves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from cbexp.drivers.vllm import start
from cbexp.drivers.vllm.driver import VllmDriver
from cbexp.engine.types import EngineError
from cbexp.errors import ConfigError, MemoryBudgetError, NotApplicableError
from cbexp.rounds import measure_round_memory
from tests.sweep.conftest import is_running, wait_until
from tests.vllm_fixtures import FakeVllm, build, complete, experiment


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return FakeVllm(monkeypatch, tmp_path)


@pytest.fixture
def make_driver(fake):
    drivers = []

    def make(on_progress=lambda _: None, **changes):
        driver, prompts = build(experiment(fake, **changes), fake, on_progress)
        drivers.append(driver)
        return driver, prompts

    yield make
    for driver in drivers:
        driver.close()


def test_rounds_on_one_warm_engine(make_driver, fake):
    driver, prompts = make_driver()
    driver.warmup()
    for _ in range(3):
        ids = driver.add_requests(prompts, max_new_tokens=[3, 8, 1, 5])
        completions = driver.drive_until_empty()
        assert list(completions) == ids
        assert [c.completion_ids for c in completions.values()] == [
            complete(prompt, limit) for prompt, limit in zip(prompts, [3, 8, 1, 5], strict=True)
        ]
        assert {c.finish_reason for c in completions.values()} == {"length"}
    assert len(fake.notes("start")) == 1
    assert fake.notes("round") == [[4, [3, 8, 1, 5]]] * 3


def test_generations_are_requests_of_their_own_and_share_blocks(make_driver, fake):
    driver, prompts = make_driver(num_generations=2)
    ids = driver.add_requests(prompts[:2], num_generations=2)
    completions = driver.drive_until_empty()
    assert [completions[i].completion_ids for i in ids] == [
        complete(prompt, 8) for prompt in prompts[:2] for _ in range(2)
    ]
    assert fake.notes("start")[0]["enable_prefix_caching"] is True
    driver.add_requests(prompts[:1])
    driver.drive_until_empty()
    assert len(fake.notes("reset")) == 2


def test_our_stop_ids_end_a_completion(make_driver):
    _, prompts = make_driver()
    stop = complete(prompts[0], 8)[2]
    driver, _ = make_driver(ignore_eos=False, eos_token_ids=[stop])
    driver.add_requests(prompts[:1])
    (completion,) = driver.drive_until_empty().values()
    assert completion.finish_reason == "eos"
    assert completion.completion_ids == complete(prompts[0], 3)


def test_the_clock_runs_in_the_worker(make_driver):
    driver, prompts = make_driver()
    driver.warmup()
    before_s = time.perf_counter()
    driver.add_requests(prompts)
    completions = driver.drive_until_empty()
    start_s, end_s = driver.round_span_s
    assert before_s < start_s < end_s < time.perf_counter()
    for completion in completions.values():
        assert completion.timings.submitted_s == start_s
        assert completion.timings.first_token_s is None
        assert completion.timings.finished_s == end_s
    assert "request_times" in driver.resolved["not_measured"]


def test_what_vllm_takes_of_a_gpu_is_what_is_in_use_more(make_driver, fake, monkeypatch):
    used = fake.tmp_path / "used"
    program = fake.tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nlast=; for last; do :; done; cat {used}_$last\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.tmp_path}:{os.environ['PATH']}")
    fake.misbehave("cuda")
    on_cpu, prompts = make_driver()
    config = dataclasses.replace(
        on_cpu._config,
        device_type="cuda",
        environment={**on_cpu._config.environment, "CUDA_VISIBLE_DEVICES": "3"},
    )
    driver = VllmDriver(config)
    used.with_name("used_3").write_text("100\n")
    driver.warmup()
    used.with_name("used_3").write_text("612\n")
    driver.add_requests(prompts)
    driver.drive_until_empty()
    assert driver.device_bytes == 512 * 2**20
    memory = measure_round_memory(driver, torch.device("meta"))
    assert measure_round_memory(None, torch.device("meta")).peak_reserved_gib is None
    assert (memory.peak_reserved_gib, memory.peak_allocated_gib) == (0.5, None)
    program.write_text("#!/bin/sh\nexit 9\n")
    driver.add_requests(prompts)
    driver.drive_until_empty()
    assert driver.device_bytes is None
    driver.close()


def test_request_times_are_vllms(make_driver, fake):
    driver, prompts = make_driver(driver={"request_times": True})
    driver.add_requests(prompts)
    completions = driver.drive_until_empty()
    for completion in completions.values():
        times = completion.timings
        assert times.submitted_s < times.scheduled_s < times.first_token_s < times.finished_s
        assert times.finished_s < driver.round_span_s[1]
    assert fake.notes("start")[0]["disable_log_stats"] is False
    assert "request_times" not in driver.resolved["not_measured"]


def test_what_vllm_resolved_is_told(make_driver):
    told = []
    driver, _ = make_driver(on_progress=told.append)
    assert "versions" not in driver.resolved
    driver.warmup()
    resolved = driver.resolved
    assert resolved["versions"]["vllm"] == "0.26.0"
    assert (resolved["page_size"], resolved["num_blocks"]) == (16, 1000)
    assert resolved["cudagraph_mode"] is None
    assert resolved["device_name"] == "a fake device"
    assert resolved["start_s"]["total"] >= resolved["start_s"]["engine"]
    assert "importing" in told[1]
    assert "16,000 tokens" in told[-1]


def test_what_vllm_prints_is_in_its_log(make_driver, fake):
    driver, prompts = make_driver()
    driver.add_requests(prompts)
    driver.drive_until_empty()
    log_path = fake.tmp_path / "vllm.log"
    wait_until(lambda: "the engine's process prints" in log_path.read_text())
    log = log_path.read_text()
    for line in ("on stdout when it is imported", "descriptor of stdout", "prints on stdout in a round"):
        assert line in log


@pytest.mark.parametrize("words", ["short", "long"])
def test_other_lengths_than_asked_fail_their_requests(make_driver, fake, words):
    fake.misbehave(words)
    driver, prompts = make_driver()
    driver.add_requests(prompts)
    completions = driver.drive_until_empty()
    assert {c.finish_reason for c in completions.values()} == {"failed"}
    assert all("of 8 tokens" in c.error for c in completions.values())


@pytest.mark.parametrize(
    ("words", "error_class", "text"),
    [
        ("crash_at_start", EngineError, "RuntimeError: something is amiss with the model"),
        ("no_memory", MemoryBudgetError, "ValueError: Free memory on device is less"),
        ("exit_at_start", EngineError, "exit code 3"),
        ("no_device", NotApplicableError, "no device that is here"),
        ("cuda", NotApplicableError, "takes cuda"),
    ],
)
def test_a_start_that_fails(make_driver, fake, words, error_class, text):
    fake.misbehave(words)
    driver, prompts = make_driver()
    with pytest.raises(error_class, match=text) as raised:
        driver.warmup()
    if error_class is not NotApplicableError:
        assert "vllm.log" in str(raised.value)
    fake.misbehave("")
    driver.add_requests(prompts)
    assert len(driver.drive_until_empty()) == 4


IMPORTED = {
    "event": "imported",
    "versions": {"vllm": "1"},
    "import_s": 1.0,
    "device_type": "cpu",
    "device_name": "x",
}


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (
            [{"event": "importing"}, {"event": "imported"}],
            "'imported' without a proper versions.vllm, import_s, device_type, device_name",
        ),
        ([{"event": "importing"}, IMPORTED | {"versions": []}], "'imported' without a proper versions.vllm"),
        (
            [{"event": "importing"}, IMPORTED, {"event": "ready", "engine_s": 1.0, "settings": {}}],
            "'ready' without a proper settings.num_blocks, settings.page_size",
        ),
        ([{"event": "error"}], "'error' without a proper message"),
        ([{"event": "not_installed"}], "'not_installed' without a proper python"),
    ],
)
def test_a_program_with_other_answers_than_the_workers_is_told_from_vllm(make_driver, fake, answers, text):
    driver, _ = make_driver(driver={"python": str(write_program(fake, map(json.dumps, answers)))})
    with pytest.raises(EngineError, match=text) as raised:
        driver.warmup()
    assert "vLLM failed while" in str(raised.value)
    assert "driver.python must be a Python interpreter" in str(raised.value)
    assert str(fake.tmp_path / "vllm.log") in str(raised.value)


def write_program(fake, lines):
    """A program that prints lines and waits."""
    program = fake.tmp_path / "program.sh"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\nsleep 600\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("line", ["hello banner", '{"event": ["importing"]}', "{}", "[1]"])
def test_a_wrapper_that_prints_on_stdout_is_told_not_to(make_driver, fake, line):
    driver, _ = make_driver(driver={"python": str(write_program(fake, [line]))})
    with pytest.raises(
        EngineError, match="vLLM failed while starting: it wrote what is no message"
    ) as raised:
        driver.warmup()
    assert line in str(raised.value)
    assert "a wrapper that starts one and prints nothing on stdout itself" in str(raised.value)
    assert str(fake.tmp_path / "vllm.log") in str(raised.value)


def test_a_start_that_hangs_ends_in_time_and_says_where(make_driver, fake, monkeypatch):
    fake.misbehave("hang_at_start")
    log_path, told = fake.tmp_path / "vllm.log", []

    def on_progress(text):
        told.append(text)
        if "loading weights" in text:
            wait_until(lambda: "60%" in log_path.read_text())
            later_s = time.monotonic() + 1200
            monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: later_s))

    driver, _ = make_driver(on_progress=on_progress)
    with pytest.raises(EngineError, match=r"driver.start_timeout_s=1200 .*Capturing CUDA graphs:  60%"):
        driver.warmup()
    assert told[-1] == "vLLM: loading weights, compiling and capturing ..."


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("die_in_round", "killed by SIGKILL, perhaps by the kernel"),
        ("raise_in_round", "EngineCore encountered an issue"),
        ("wrong_order", "not the 4 asked"),
        ("lose_one", "answered 3 prompts"),
    ],
)
def test_a_round_that_breaks_fails_its_requests_and_leaves_a_usable_driver(make_driver, fake, words, text):
    driver, prompts = make_driver()
    fake.misbehave(words)
    driver.add_requests(prompts)
    with pytest.raises(EngineError, match=text):
        driver.drive_until_empty()
    assert {c.finish_reason for c in driver.partial_completions.values()} == {"failed"}
    wait_until(lambda: not is_running(fake.notes("engine_core")[0]))
    fake.misbehave("")
    driver.add_requests(prompts)
    assert [c.completion_ids for c in driver.drive_until_empty().values()] == [
        complete(p, 8) for p in prompts
    ]


def test_blocks_that_stay_in_use_end_the_round(make_driver, fake):
    fake.misbehave("busy_cache")
    driver, prompts = make_driver(cache={"block_sharing": "on"})
    driver.add_requests(prompts)
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        driver.drive_until_empty()


def test_ctrl_c_ends_the_worker_and_all_that_it_started(make_driver, fake):
    driver, prompts = make_driver()
    fake.misbehave("hang_in_round")
    driver.warmup()
    driver.add_requests(prompts)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        driver.drive_until_empty()
    wait_until(lambda: not is_running(fake.notes("engine_core")[0]))


def test_close_ends_the_worker_and_all_that_it_started(make_driver, fake):
    driver, prompts = make_driver()
    driver.warmup()
    (engine_core,) = fake.notes("engine_core")
    assert is_running(engine_core)
    driver.close()
    driver.close()
    wait_until(lambda: not is_running(engine_core))
    with pytest.raises(EngineError, match="closed"):
        driver.add_requests(prompts)


def test_an_interpreter_without_vllm_says_how_to_get_it(make_driver, fake):
    driver, _ = make_driver(driver={"pythonpath": None})
    with pytest.raises(ConfigError, match=r"cannot import vllm.*pip install vllm.*driver.python="):
        driver.warmup()


def test_a_bad_prompt_is_refused_before_anything_starts(make_driver, fake):
    driver, prompts = make_driver()
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        driver.add_requests([prompts[0], []])
    assert fake.notes("start") == []
