"""Rounds and whole jobs through vLLM's worker: completions, times, records, and a vLLM that misbehaves."""

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
from cbexp.config import DatasetConfig, DriverConfig, ModelConfig, SamplingConfig
from cbexp.drivers.vllm import start
from cbexp.drivers.vllm.driver import VllmDriver
from cbexp.engine import Sampling
from cbexp.engine.requests import LOGPROB_FIELDS
from cbexp.engine.types import EngineError
from cbexp.errors import ConfigError, MemoryBudgetError, NotApplicableError
from cbexp.experiment import run_experiment
from cbexp.rounds import measure_round_memory
from tests.drivers.conftest import drive, ids_of
from tests.model_fixtures import build_tokenizer, save_model
from tests.sweep.conftest import is_running, wait_until
from tests.vllm_fixtures import FakeVllm, complete


@pytest.fixture
def fake(monkeypatch, tmp_path):
    fake = FakeVllm(monkeypatch, tmp_path)
    yield fake
    for driver in fake.drivers:
        driver.close()


def test_rounds_on_one_warm_engine_from_its_start_to_its_end(fake):
    told = []
    driver, prompts = fake.build(told.append)
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        driver.add_requests([prompts[0], []])
    assert fake.notes("start") == []
    assert "versions" not in driver.resolved

    driver.warmup()
    expected = {"page_size": 16, "num_blocks": 1000, "cudagraph_mode": None, "device_name": "a fake device"}
    assert {key: driver.resolved[key] for key in expected} == expected
    assert driver.resolved["versions"]["vllm"] == "0.26.0"
    assert driver.resolved["start_s"]["total"] >= driver.resolved["start_s"]["engine"]
    assert "importing" in told[1]
    assert "16,000 tokens" in told[-1]

    limits = [3, 8, 1, 5]
    for _ in range(3):
        before_s = time.perf_counter()
        completions = drive(driver, prompts, max_new_tokens=limits)
        assert ids_of(completions) == list(map(complete, prompts, limits))
        assert {c.finish_reason for c in completions} == {"length"}
        start_s, end_s = driver.round_span_s
        assert before_s < start_s < end_s < time.perf_counter()
        for times in (completion.timings for completion in completions):
            assert (times.submitted_s, times.first_token_s, times.finished_s) == (start_s, None, end_s)
    assert len(fake.notes("start")) == 1
    assert fake.notes("round") == [limits] * 3
    assert not any(entry.endswith("cbexp/drivers/vllm") for entry in fake.notes("path")[0])

    wait_until(lambda: "the engine's process prints" in fake.log_path.read_text())
    for line in ("on stdout when it is imported", "descriptor of stdout", "prints on stdout in a round"):
        assert line in fake.log_path.read_text()

    (engine_core,) = fake.notes("engine_core")
    assert is_running(engine_core)
    driver.close()
    driver.close()
    wait_until(lambda: not is_running(engine_core))
    with pytest.raises(EngineError, match="closed"):
        driver.add_requests(prompts)


def test_generations_stop_ids_and_times_of_requests(fake):
    driver, prompts = fake.build(driver={"request_times": True}, num_generations=2)
    completions = drive(driver, prompts[:2], num_generations=2)
    assert ids_of(completions) == [complete(prompt, 8) for prompt in prompts[:2] for _ in range(2)]
    for times in (completion.timings for completion in completions):
        assert times.submitted_s < times.scheduled_s < times.first_token_s < times.finished_s
        assert times.finished_s < driver.round_span_s[1]
    assert "request_times" not in driver.resolved["not_measured"]
    drive(driver, prompts[:1])
    assert len(fake.notes("reset")) == 2

    driver, _ = fake.build(ignore_eos=False, eos_token_ids=[complete(prompts[0], 3)[2]])
    (completion,) = drive(driver, prompts[:1])
    assert (completion.finish_reason, completion.completion_ids) == ("eos", complete(prompts[0], 3))


@pytest.mark.parametrize(
    ("settings", "mode", "columns"),
    [
        ({}, "raw", {"logprobs_model", "logprobs_raw"}),
        ({"temperature": 1.0, "top_k": 5}, "raw", {"logprobs_model", "logprobs_raw"}),
        ({"temperature": 0.5}, "processed", {"logprobs_model", "logprobs_sampled"}),
        ({"temperature": 0.5, "top_p": 0.9}, "processed", {"logprobs_sampled"}),
    ],
)
def test_log_probabilities_fill_the_fields_that_they_equal(fake, settings, mode, columns):
    driver, prompts = fake.build(logprobs=True, **settings)
    (completion,) = drive(driver, prompts[:1])
    assert fake.notes("start")[0]["logprobs_mode"] == f"{mode}_logprobs"
    assert set(driver.resolved["logprob_fields"]) == columns
    expected = tuple(-token / 97 for token in completion)
    for name in LOGPROB_FIELDS:
        assert getattr(completion, name) == (expected if name in columns else ()), name


def test_vllm_gets_every_setting_and_says_what_ended_a_request(fake):
    first = fake.build()[1][0]
    ids = complete(first, 8)
    shape = {"temperature": 0.7, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 3}
    driver, _ = fake.build(stop_token_ids=[ids[1], ids[4]], **shape)
    (completion,) = drive(driver, [first])
    found = (completion.completion_ids, completion.finish_reason, completion.stop_reason)
    assert found == (ids[:5], "stop", ids[4])
    given = shape | {"top_k": 0, "min_tokens": shape["min_new_tokens"], "min_p": 0.0}
    del given["min_new_tokens"]
    assert fake.notes("sampling") == [given]
    with pytest.raises(ValueError, match="this driver samples all its requests by its own settings"):
        driver.add_requests([first], sampling=Sampling())


def test_stop_strings_come_with_the_tokenizer_of_real_weights(fake, tmp_path):
    config, text = fake.experiment(), DatasetConfig(num_prompts=1)
    first = [40, 20]
    changes = {
        "sampling": SamplingConfig(max_new_tokens=8, ignore_eos=True, stop_strings=["?@"]),
        "dataset": text,
    }
    with pytest.raises(
        ConfigError, match=r"^sampling\.stop_strings do not work with driver=vllm model\.init=random"
    ):
        fake.build(config=dataclasses.replace(config, **changes), tokenizer=build_tokenizer())
    model = ModelConfig(name="hf", name_or_path=str(save_model(tmp_path / "model")), device="cpu")
    driver, _ = fake.build(
        config=dataclasses.replace(config, model=model, **changes), tokenizer=build_tokenizer()
    )
    (completion,) = drive(driver, [first])
    assert (bytes(completion), completion.finish_reason, completion.stop_reason) == (b"<=>?@", "stop", "?@")


def test_what_vllm_takes_of_a_gpu_is_what_is_in_use_more(fake, monkeypatch):
    used = fake.tmp_path / "used_3"
    program = f"#!/bin/sh\nlast=; for last; do :; done; cat {fake.tmp_path}/used_$last\n"
    write_program(fake.tmp_path / "nvidia-smi", program)
    monkeypatch.setenv("PATH", f"{fake.tmp_path}:{os.environ['PATH']}")
    fake.misbehave("cuda")
    on_cpu, prompts = fake.build()
    environment = on_cpu._config.environment | {"CUDA_VISIBLE_DEVICES": "3"}
    driver = VllmDriver(dataclasses.replace(on_cpu._config, device_type="cuda", environment=environment))
    fake.drivers.append(driver)
    used.write_text("100\n")
    driver.warmup()
    used.write_text("612\n")
    drive(driver, prompts)
    assert driver.device_bytes == 512 * 2**20
    memory = measure_round_memory(driver, torch.device("meta"))
    assert (memory.peak_reserved_gib, memory.peak_allocated_gib) == (0.5, None)
    used.unlink()
    drive(driver, prompts)
    assert driver.device_bytes is None


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_answers_that_are_too_short_fail_their_requests(fake):
    fake.misbehave("short")
    driver, prompts = fake.build()
    for completion in drive(driver, prompts):
        assert completion.finish_reason == "failed"
        assert "of 8 tokens" in completion.error


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
def test_a_start_that_fails(fake, words, error_class, text):
    fake.misbehave(words)
    driver, prompts = fake.build()
    with pytest.raises(error_class, match=text):
        driver.warmup()
    fake.misbehave("")
    assert len(drive(driver, prompts)) == 4


def test_an_interpreter_without_vllm_says_how_to_get_it(fake):
    driver, _ = fake.build(driver={"pythonpath": None})
    with pytest.raises(ConfigError, match=r"cannot import vllm.*pip install vllm.*driver.python="):
        driver.warmup()


def test_a_start_that_hangs_ends_in_time_and_says_where(fake, monkeypatch):
    fake.misbehave("hang_at_start")

    def on_progress(text):
        if "loading weights" in text:
            wait_until(lambda: "60%" in fake.log_path.read_text())
            later_s = time.monotonic() + 1200
            monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: later_s))

    driver, _ = fake.build(on_progress)
    with pytest.raises(EngineError, match=r"driver.start_timeout_s=1200 .*Capturing CUDA graphs:  60%"):
        driver.warmup()


def test_a_wrapper_that_prints_on_stdout_is_told_from_vllm(fake):
    wrapper = write_program(fake.tmp_path / "wrapper.sh", "#!/bin/sh\necho hello banner\nsleep 600\n")
    driver, _ = fake.build(driver={"python": wrapper})
    with pytest.raises(EngineError, match=r"no message: .*hello banner.*a wrapper that .*vllm\.log"):
        driver.warmup()


@pytest.mark.parametrize(
    ("words", "error_class", "text"),
    [
        ("die_in_round", EngineError, "killed by SIGKILL, perhaps by the kernel"),
        ("raise_in_round", EngineError, "EngineCore encountered an issue"),
        ("busy_cache", EngineError, "could not reset its prefix cache"),
        ("hang_in_round", KeyboardInterrupt, None),
    ],
)
def test_a_round_that_breaks_fails_its_requests_and_leaves_a_usable_driver(fake, words, error_class, text):
    driver, prompts = fake.build(cache={"block_sharing": "on"})
    driver.warmup()
    fake.misbehave(words)
    driver.add_requests(prompts)
    if error_class is KeyboardInterrupt:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(error_class, match=text):
        driver.drive_until_empty()
    assert {c.finish_reason for c in driver.partial_completions.values()} == {"failed"}
    wait_until(lambda: not is_running(fake.notes("engine_core")[0]))
    fake.misbehave("")
    assert ids_of(drive(driver, prompts)) == [complete(prompt, 8) for prompt in prompts]


def test_a_job_has_the_records_of_any_other_and_asks_nothing_of_a_gpu(fake, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("this takes memory of a GPU beside vLLM")

    config = fake.experiment(cache={"scheduler": "prefill_first"}, median_new_tokens=4, max_new_tokens=20)
    folder = fake.tmp_path / "run"
    with monkeypatch.context() as patch:
        for name in ("mem_get_info", "synchronize", "reset_peak_memory_stats", "current_stream"):
            patch.setattr(torch.cuda, name, refuse)
        patch.setattr("cbexp.job.measure_roofline", refuse)
        patch.setattr("cbexp.job.load_model", refuse)
        outcome = run_experiment(config, folder, [])
    assert outcome.status == "completed", outcome.message
    assert "vLLM 0.26.0 on a fake device, ready in" in capsys.readouterr().out
    idle = {"setting": "cache.scheduler", "value": "prefill_first"}
    idle["reason"] = "driver=vllm, which decides itself"
    expected = {
        "settings_without_effect": [idle],
        "backend": "vllm",
        "device": "cpu",
        "attn_impl": "vllm",
        "compile_mode": "default",
        "num_finished": 8,
        "has_limits_per_prompt": True,
        "are_rounds_identical": True,
        "decode_step_s": None,
        "roofline_fraction": None,
        "rescoring": {
            "num_completions": 0,
            "num_tokens": 0,
            "note": "driver=vllm has the model in a process of its own",
        },
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert {key: summary[key] for key in expected} == expected
    engine = json.loads((folder / "engine.json").read_text())
    assert engine["plan"]["settings_without_effect"] == [idle]
    assert engine["driver"]["versions"]["vllm"] == "0.26.0"
    assert engine["driver"]["engine_arguments"]["load_format"] == "dummy"
    not_measured = {"steps", "roofline", "allocated_memory", "request_times"}
    assert set(engine["driver"]["not_measured"]) == not_measured
    rounds, requests = (read_jsonl(folder / f"{name}.jsonl")[0] for name in ("rounds", "requests"))
    assert [r["num_tokens"] for r in requests] == [r["max_new_tokens"] for r in requests]
    # The round's clock is the worker's.
    latencies = {r["round_index"]: r["latency_s"] for r in requests}
    assert [latencies[r["round_index"]] for r in rounds] == pytest.approx([r["wall_s"] for r in rounds])
    assert "vLLM prints" in (folder / "vllm.log").read_text()

    in_our_process = dataclasses.replace(config, driver=DriverConfig(name="generate"))
    other = run_experiment(in_our_process, fake.tmp_path / "generate", [])
    assert other.summary["workload_hash"] == summary["workload_hash"]
