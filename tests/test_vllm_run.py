"""Whole jobs with driver=vllm: their records, the identity of their work, and how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cbexp.artifacts import read_jsonl
from cbexp.config import DriverConfig
from cbexp.experiment import run_experiment
from tests.vllm_fixtures import FAKE, FakeVllm, experiment

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return FakeVllm(monkeypatch, tmp_path)


def read_json(path):
    return json.loads(path.read_text())


def run(config, fake, name="run"):
    folder = fake.tmp_path / name
    return run_experiment(config, folder, []), folder


def test_a_job_has_the_records_of_any_other(fake):
    driver, cache = {"request_times": True}, {"scheduler": "prefill_first"}
    config = experiment(fake, driver=driver, cache=cache, median_new_tokens=4, max_new_tokens=20)
    outcome, folder = run(config, fake)
    assert outcome.status == "completed", outcome.message
    summary = read_json(folder / "summary.json")
    (idle,) = summary["settings_without_effect"]
    assert idle == {
        "setting": "cache.scheduler",
        "value": "prefill_first",
        "reason": "driver=vllm, which decides itself",
    }
    assert read_json(folder / "engine.json")["plan"]["settings_without_effect"] == [idle]
    assert summary["backend"] == "vllm"
    assert (summary["device"], summary["dtype"], summary["attn_impl"]) == ("cpu", "float32", "vllm")
    assert summary["compile_mode"] == "default"
    assert summary["num_finished"] == 8
    assert summary["num_short"] == 0
    assert summary["has_limits_per_prompt"] is True
    assert summary["are_rounds_identical"] is True
    assert summary["ttft_s"]["p50"] > 0
    assert summary["decode_step_s"] is None
    assert summary["roofline_fraction"] is None
    requests, _ = read_jsonl(folder / "requests.jsonl")
    assert [r["num_tokens"] for r in requests] == [r["max_new_tokens"] for r in requests]
    assert len({r["max_new_tokens"] for r in requests}) > 1
    engine = read_json(folder / "engine.json")["driver"]
    assert engine["versions"]["vllm"] == "0.26.0"
    assert engine["engine_arguments"]["load_format"] == "dummy"
    assert engine["variables"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert set(engine["not_measured"]) == {"steps", "roofline", "allocated_memory"}
    assert "vLLM prints" in (folder / "vllm.log").read_text()
    assert len(fake.notes("start")) == 1
    assert len(fake.notes("round")) == 3


def test_the_rounds_clock_is_the_workers(fake):
    outcome, folder = run(experiment(fake), fake)
    rounds, _ = read_jsonl(folder / "rounds.jsonl")
    requests, _ = read_jsonl(folder / "requests.jsonl")
    assert outcome.status == "completed"
    latencies = {r["round_index"]: r["latency_s"] for r in requests}
    assert [latencies[r["round_index"]] for r in rounds] == pytest.approx([r["wall_s"] for r in rounds])
    assert all(r["ttft_s"] is None for r in requests)


def test_the_workload_is_that_of_the_other_drivers(fake):
    config = experiment(fake)
    hashes = set()
    for driver in ("vllm", "sync", "generate"):
        settings = DriverConfig(name=driver, pythonpath=str(FAKE) if driver == "vllm" else None)
        outcome, _ = run(dataclasses.replace(config, driver=settings), fake, driver)
        hashes.add(outcome.summary["workload_hash"])
    assert len(hashes) == 1


def test_nothing_is_asked_of_a_gpu_in_this_process(fake, monkeypatch):
    def refuse(*_):
        raise AssertionError("this takes memory of a GPU beside vLLM")

    for name in ("mem_get_info", "synchronize", "reset_peak_memory_stats", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr("cbexp.job.measure_roofline", refuse)
    monkeypatch.setattr("cbexp.job.load_model", refuse)
    outcome, _ = run(experiment(fake), fake)
    assert outcome.status == "completed", outcome.message


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("crash_at_start", "failed"),
        ("no_memory", "out_of_memory"),
        ("no_device", "not_applicable"),
        ("short", "failed"),
    ],
)
def test_bad_ends_have_their_status(fake, words, status):
    fake.misbehave(words)
    outcome, folder = run(experiment(fake), fake)
    assert outcome.status == status
    assert read_json(folder / "status.json")["status"] == status
    assert (folder / "vllm.log").exists()


def test_a_vllm_that_is_not_installed_is_a_failure_that_says_how_to_get_it(fake):
    outcome, folder = run(experiment(fake, driver={"pythonpath": None}), fake)
    assert outcome.status == "bad_config"
    assert "pip install vllm" in read_json(folder / "status.json")["message"]


def test_the_command_line_runs_it_with_the_path_alone(fake):
    folder = fake.tmp_path / "cli"
    overrides = ["experiment=smoke", "driver=vllm", f"driver.pythonpath={FAKE}", "model.device=cpu"]
    command = [sys.executable, "-m", "cbexp", *overrides, f"hydra.run.dir={folder}", "compile.cache_dir=null"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready in" in done.stdout
    seen, *_ = fake.notes("environment")  # the process of its engine, where it gets that far, has one too
    assert seen["PYTHONPATH"] == str(FAKE)
    assert not any(entry.endswith("cbexp/drivers/vllm") for entry in seen["sys.path"])
