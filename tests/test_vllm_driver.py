"""Rounds and whole jobs through vLLM's worker: completions, times, records, and a vLLM that misbehaves."""

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

from cbexp.artifacts import read_jsonl
from cbexp.config import DriverConfig
from cbexp.drivers.vllm import start
from cbexp.drivers.vllm.driver import VllmDriver
from cbexp.engine.types import EngineError
from cbexp.errors import MemoryBudgetError, NotApplicableError
from cbexp.experiment import run_experiment
from cbexp.rounds import measure_round_memory
from tests.sweep.conftest import is_running, wait_until
from tests.vllm_fixtures import FAKE, FakeVllm, complete


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return FakeVllm(monkeypatch, tmp_path)


@pytest.fixture
def make_driver(fake):
    drivers = []

    def make(on_progress=lambda _: None, **changes):
        driver, prompts = fake.build(on_progress, **changes)
        drivers.append(driver)
        return driver, prompts

    yield make
    for driver in drivers:
        driver.close()


def test_rounds_on_one_warm_engine_from_its_start_to_its_end(make_driver, fake):
    told = []
    driver, prompts = make_driver(told.append)
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        driver.add_requests([prompts[0], []])
    assert fake.notes("start") == []
    assert "versions" not in driver.resolved

    driver.warmup()
    resolved = driver.resolved
    assert resolved["versions"]["vllm"] == "0.26.0"
    assert (resolved["page_size"], resolved["num_blocks"]) == (16, 1000)
    assert (resolved["cudagraph_mode"], resolved["device_name"]) == (None, "a fake device")
    assert resolved["start_s"]["total"] >= resolved["start_s"]["engine"]
    assert "importing" in told[1]
    assert "16,000 tokens" in told[-1]

    limits = [3, 8, 1, 5]
    for _ in range(3):
        before_s = time.perf_counter()
        ids = driver.add_requests(prompts, max_new_tokens=limits)
        completions = driver.drive_until_empty()
        assert list(completions) == ids
        expected = [complete(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
        assert [c.completion_ids for c in completions.values()] == expected
        assert {c.finish_reason for c in completions.values()} == {"length"}
        start_s, end_s = driver.round_span_s
        assert before_s < start_s < end_s < time.perf_counter()
        for completion in completions.values():
            times = completion.timings
            assert (times.submitted_s, times.first_token_s, times.finished_s) == (start_s, None, end_s)
    assert len(fake.notes("start")) == 1
    assert fake.notes("round") == [limits] * 3
    assert not any(entry.endswith("cbexp/drivers/vllm") for entry in fake.notes("path")[0])

    wait_until(lambda: "the engine's process prints" in fake.log_path.read_text())
    log = fake.log_path.read_text()
    for line in ("on stdout when it is imported", "descriptor of stdout", "prints on stdout in a round"):
        assert line in log

    (engine_core,) = fake.notes("engine_core")
    assert is_running(engine_core)
    driver.close()
    driver.close()
    wait_until(lambda: not is_running(engine_core))
    with pytest.raises(EngineError, match="closed"):
        driver.add_requests(prompts)


def test_generations_stop_ids_and_times_of_requests(make_driver, fake):
    driver, prompts = make_driver(driver={"request_times": True}, num_generations=2)
    driver.add_requests(prompts[:2], num_generations=2)
    completions = driver.drive_until_empty().values()
    expected = [complete(prompt, 8) for prompt in prompts[:2] for _ in range(2)]
    assert [c.completion_ids for c in completions] == expected
    for completion in completions:
        times = completion.timings
        assert times.submitted_s < times.scheduled_s < times.first_token_s < times.finished_s
        assert times.finished_s < driver.round_span_s[1]
    assert "request_times" not in driver.resolved["not_measured"]
    assert fake.notes("start")[0]["enable_prefix_caching"] is True
    driver.add_requests(prompts[:1])
    driver.drive_until_empty()
    assert len(fake.notes("reset")) == 2

    driver, _ = make_driver(ignore_eos=False, eos_token_ids=[complete(prompts[0], 3)[2]])
    driver.add_requests(prompts[:1])
    (completion,) = driver.drive_until_empty().values()
    assert (completion.finish_reason, completion.completion_ids) == ("eos", complete(prompts[0], 3))


def test_what_vllm_takes_of_a_gpu_is_what_is_in_use_more(make_driver, fake, monkeypatch):
    used, program = fake.tmp_path / "used_3", fake.tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nlast=; for last; do :; done; cat {fake.tmp_path}/used_$last\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.tmp_path}:{os.environ['PATH']}")
    fake.misbehave("cuda")
    on_cpu, prompts = make_driver()
    environment = on_cpu._config.environment | {"CUDA_VISIBLE_DEVICES": "3"}
    driver = VllmDriver(dataclasses.replace(on_cpu._config, device_type="cuda", environment=environment))
    used.write_text("100\n")
    driver.warmup()
    used.write_text("612\n")
    driver.add_requests(prompts)
    driver.drive_until_empty()
    assert driver.device_bytes == 512 * 2**20
    memory = measure_round_memory(driver, torch.device("meta"))
    assert (memory.peak_reserved_gib, memory.peak_allocated_gib) == (0.5, None)
    used.unlink()
    driver.add_requests(prompts)
    driver.drive_until_empty()
    assert driver.device_bytes is None
    driver.close()


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
        ("crash_at_start", EngineError, "RuntimeError: something is amiss with the model.*vllm.log"),
        ("no_memory", MemoryBudgetError, "ValueError: Free memory on device is less.*vllm.log"),
        ("exit_at_start", EngineError, "exit code 3.*vllm.log"),
        ("no_device", NotApplicableError, "no device that is here"),
        ("cuda", NotApplicableError, "takes cuda"),
    ],
)
def test_a_start_that_fails(make_driver, fake, words, error_class, text):
    fake.misbehave(words)
    driver, prompts = make_driver()
    with pytest.raises(error_class, match=text):
        driver.warmup()
    fake.misbehave("")
    driver.add_requests(prompts)
    assert len(driver.drive_until_empty()) == 4


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ['{"event": "importing"}', '{"event": "imported"}'],
            "'imported' without a proper versions.vllm, imp",
        ),
        (['{"event": "error"}'], "'error' without a proper message"),
        (["hello banner"], "starting: it wrote what is no message: .*hello banner"),
        (['{"event": ["importing"]}'], "starting: it wrote what is no message"),
    ],
)
def test_a_wrapper_that_prints_on_stdout_is_told_from_vllm(make_driver, fake, lines, text):
    program = fake.tmp_path / "program.sh"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\nsleep 600\n")
    program.chmod(0o755)
    driver, _ = make_driver(driver={"python": str(program)})
    advice = "a wrapper that starts one and prints nothing on stdout itself.*vllm.log"
    with pytest.raises(EngineError, match=f"vLLM failed while .*{text}.*{advice}"):
        driver.warmup()


def test_a_start_that_hangs_ends_in_time_and_says_where(make_driver, fake, monkeypatch):
    fake.misbehave("hang_at_start")

    def on_progress(text):
        if "loading weights" in text:
            wait_until(lambda: "60%" in fake.log_path.read_text())
            later_s = time.monotonic() + 1200
            monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: later_s))

    driver, _ = make_driver(on_progress)
    with pytest.raises(EngineError, match=r"driver.start_timeout_s=1200 .*Capturing CUDA graphs:  60%"):
        driver.warmup()


@pytest.mark.parametrize(
    ("words", "error_class", "text"),
    [
        ("die_in_round", EngineError, "killed by SIGKILL, perhaps by the kernel"),
        ("raise_in_round", EngineError, "EngineCore encountered an issue"),
        ("wrong_order", EngineError, "not the 4 asked"),
        ("busy_cache", EngineError, "could not reset its prefix cache"),
        ("hang_in_round", KeyboardInterrupt, None),
    ],
)
def test_a_round_that_breaks_fails_its_requests_and_leaves_a_usable_driver(
    make_driver, fake, words, error_class, text
):
    driver, prompts = make_driver(cache={"block_sharing": "on"})
    driver.warmup()
    fake.misbehave(words)
    driver.add_requests(prompts)
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    if words == "hang_in_round":
        timer.start()
    with pytest.raises(error_class, match=text):
        driver.drive_until_empty()
    assert {c.finish_reason for c in driver.partial_completions.values()} == {"failed"}
    wait_until(lambda: not is_running(fake.notes("engine_core")[0]))
    fake.misbehave("")
    driver.add_requests(prompts)
    completions = [c.completion_ids for c in driver.drive_until_empty().values()]
    assert completions == [complete(prompt, 8) for prompt in prompts]


# Whole jobs


def run(fake, config, name="run"):
    folder = fake.tmp_path / name
    return run_experiment(config, folder, []), folder


def test_a_job_has_the_records_of_any_other_and_asks_nothing_of_a_gpu(fake, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("this takes memory of a GPU beside vLLM")

    for name in ("mem_get_info", "synchronize", "reset_peak_memory_stats", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr("cbexp.job.measure_roofline", refuse)
    monkeypatch.setattr("cbexp.job.load_model", refuse)
    cache = {"scheduler": "prefill_first"}
    config = fake.experiment(cache=cache, median_new_tokens=4, max_new_tokens=20)
    outcome, folder = run(fake, config)
    assert outcome.status == "completed", outcome.message
    assert "vLLM 0.26.0 on a fake device, ready in" in capsys.readouterr().out
    summary, engine = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "engine"))
    idle = {"setting": "cache.scheduler", "value": "prefill_first"}
    idle["reason"] = "driver=vllm, which decides itself"
    expected = {
        "settings_without_effect": [idle],
        "backend": "vllm",
        "device": "cpu",
        "dtype": "float32",
        "attn_impl": "vllm",
        "compile_mode": "default",
        "num_finished": 8,
        "num_short": 0,
        "has_limits_per_prompt": True,
        "are_rounds_identical": True,
        "decode_step_s": None,
        "roofline_fraction": None,
    }
    assert {key: summary[key] for key in expected} == expected
    assert engine["plan"]["settings_without_effect"] == [idle]
    engine = engine["driver"]
    assert engine["versions"]["vllm"] == "0.26.0"
    assert engine["engine_arguments"]["load_format"] == "dummy"
    assert engine["variables"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert set(engine["not_measured"]) == {"steps", "roofline", "allocated_memory", "request_times"}
    rounds, requests = (read_jsonl(folder / f"{name}.jsonl")[0] for name in ("rounds", "requests"))
    assert [r["num_tokens"] for r in requests] == [r["max_new_tokens"] for r in requests]
    assert len({r["max_new_tokens"] for r in requests}) > 1
    # The round's clock is the worker's.
    latencies = {r["round_index"]: r["latency_s"] for r in requests}
    assert [latencies[r["round_index"]] for r in rounds] == pytest.approx([r["wall_s"] for r in rounds])
    assert all(r["ttft_s"] is None for r in requests)
    assert "vLLM prints" in (folder / "vllm.log").read_text()
    assert (len(fake.notes("start")), len(fake.notes("round"))) == (1, 3)

    monkeypatch.undo()
    other, _ = run(fake, dataclasses.replace(config, driver=DriverConfig(name="generate")), "generate")
    assert other.summary["workload_hash"] == summary["workload_hash"]


@pytest.mark.parametrize(
    ("words", "pythonpath", "status", "said"),
    [
        ("no_memory", str(FAKE), "out_of_memory", "Lower cache.max_memory_fraction"),
        ("short", str(FAKE), "failed", "of 8 tokens"),
        ("", None, "bad_config", "pip install vllm"),
    ],
)
def test_bad_ends_have_their_status(fake, words, pythonpath, status, said):
    fake.misbehave(words)
    outcome, folder = run(fake, fake.experiment(driver={"pythonpath": pythonpath}))
    assert outcome.status == status
    assert said in json.loads((folder / "status.json").read_text())["message"]
    assert (folder / "vllm.log").exists()
