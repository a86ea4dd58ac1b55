"""A whole run has its roofline: the bandwidth is measured once, before the cache takes the memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cbexp import job, rounds
from cbexp.config import (
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.experiment import run_experiment

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BANDWIDTH = 1e12  # bytes a second


def make_config(driver="sync"):
    return ExperimentConfig(
        model=ModelConfig(name="tiny", name_or_path="builtin:tiny", num_threads=1, device="cpu"),
        dataset=DatasetConfig(verifier="arithmetic", num_prompts=3),
        sampling=SamplingConfig(max_new_tokens=6, ignore_eos=True),
        driver=DriverConfig(name=driver),
        tracking=TrackingConfig(mode="disabled"),
        num_rounds=1,
        num_warmup_rounds=0,
    )


@pytest.fixture
def calls(monkeypatch):
    """What is measured and built, in order, by a job that takes the model, which is on the CPU, to lie on a GPU."""
    order = []
    load_model, build_driver = job.load_model, job.build_driver

    def measure(device):
        order.append(f"bandwidth of {device}")
        return BANDWIDTH

    def build(*arguments, **options):
        order.append("driver")
        return build_driver(*arguments, **options)

    monkeypatch.setattr(job, "load_model", lambda *a: dataclasses.replace(load_model(*a), device=CUDA))
    monkeypatch.setattr(job, "build_driver", build)
    monkeypatch.setattr("cbexp.planning.roofline.measure_read_bandwidth", measure)
    # All else that would be asked of that GPU.
    monkeypatch.setattr(job, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(rounds, "synchronize", lambda device: None)
    measure_memory = rounds.measure_memory
    monkeypatch.setattr(rounds, "measure_memory", lambda device: measure_memory(CPU))
    return order


@pytest.mark.parametrize(
    ("driver", "sees_its_steps"), [("sync", True), ("manager", False), ("generate", True)]
)
def test_a_run_on_a_gpu_measures_the_bandwidth_first(tmp_path, calls, driver, sees_its_steps):
    outcome = run_experiment(make_config(driver), tmp_path / "run", [])
    assert outcome.status == "completed", outcome.message
    assert calls == ["bandwidth of cpu", "driver"]  # the device of the plan, which is the CPU here
    summary = outcome.summary
    assert summary["bandwidth_bytes_per_s"] == BANDWIDTH
    fraction = summary["roofline_fraction"]
    assert fraction > 0 if sees_its_steps else fraction is None
    assert summary["durations_s"]["measure_bandwidth"] >= 0


def test_a_run_on_a_cpu_measures_none(tmp_path, monkeypatch):
    monkeypatch.setattr(
        job, "measure_roofline", lambda *a: pytest.fail("a CPU has no bandwidth worth the name")
    )
    summary = run_experiment(make_config(), tmp_path / "run", []).summary
    assert (summary["bandwidth_bytes_per_s"], summary["roofline_fraction"]) == (None, None)
    assert "measure_bandwidth" not in summary["durations_s"]
