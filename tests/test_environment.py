"""What the environment record holds, what it must never hold, and that seeds and memory do as they say."""

import json
import logging
import random
import sys
import weakref
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from cbexp import environment
from cbexp.environment import (
    collect_environment,
    limit_threads,
    measure_memory,
    quiet_libraries,
    release_memory,
    reset_peak_memory,
    seed_everything,
    synchronize,
)

CPU = torch.device("cpu")


def test_environment_is_plain_json_with_versions_hardware_and_named_variables_alone(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret-value")
    found = collect_environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["versions"] == {"torch": metadata.version("torch"), "no-such-package": None}
    assert found["python"] == sys.version.split()[0]
    assert found["cpu"]["num_usable_cores"] >= 1
    assert found["cpu"]["memory_gib"] > 0.1
    assert (found["cuda"] is not None) == torch.cuda.is_available()
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert "a-secret-value" not in json.dumps(found)


def test_seed_makes_all_generators_repeat():
    def draw():
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()

    seed_everything(7)
    first = draw()
    assert draw() != first
    seed_everything(7)
    assert draw() == first
    seed_everything(2**32 + 5)  # numpy takes 32 bits only


def test_threads_are_set_recorded_and_given_back():
    default = torch.get_num_threads()
    limit_threads(default + 1)
    assert collect_environment()["cpu"]["num_threads"] == default + 1
    limit_threads(None)
    assert collect_environment()["cpu"]["num_threads"] == environment.DEFAULT_NUM_THREADS
    torch.set_num_threads(default)


def test_cpu_has_host_memory_only():
    use = measure_memory(CPU)
    assert (use.allocated_gib, use.reserved_gib, use.peak_allocated_gib, use.peak_reserved_gib) == (None,) * 4
    in_use = psutil.Process().memory_info().rss
    block = np.ones(int(use.peak_host_gib * 2**30) - in_use + 2**26, dtype=np.uint8)  # over the peak so far
    del block
    assert use.peak_host_gib < measure_memory(CPU).peak_host_gib < 1000
    reset_peak_memory(CPU)
    synchronize(CPU)


def test_release_collects_garbage_and_resets_compiled_code(monkeypatch):
    calls = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: calls.append("reset"))
    node = torch.nn.Identity()
    node.__dict__["itself"], alive = node, weakref.ref(node)
    del node
    release_memory()
    assert (alive(), calls) == (None, ["reset"])


SMI = """#!/bin/sh
case "$1 $2" in
  "--query-gpu=driver_version --format=csv,noheader") echo 580.1 ;;
  "--query-gpu=index,name,memory.used,memory.total --format=csv,noheader") echo "0, Card, 10 MiB, 100 MiB" ;;
  "--query-gpu=uuid,clocks."*)
    echo "GPU-1-a, 345, 1980, 1593, 3201, 71.59, 700.00, [N/A], 4"; echo "GPU-2-b, 1, 1, 1, 1, 1, 1, 1, 1" ;;
  "--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits")
    echo "GPU-1-a, 12, 5"; echo "GPU-2-b, 13, 6" ;;
esac
"""


def test_gpu_is_described_with_driver_and_processes(tmp_path, monkeypatch):
    """The same on a machine without one: a stand-in for the device and for nvidia-smi."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    card = SimpleNamespace(name="Card", uuid="1-a", total_memory=2**31, major=9, minor=0)
    card.multi_processor_count = 132
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: card)
    found = collect_environment()["cuda"]
    device = {"name": "Card", "uuid": "1-a", "memory_gib": 2.0, "compute_capability": "9.0"}
    assert found["devices"] == [device | {"num_multiprocessors": 132}]
    (state,) = found.pop("gpu_states")
    expected = {"sm_mhz": 345, "max_sm_mhz": 1980, "power_w": 71.59, "memory_used_mib": 4}
    assert {key: state[key] for key in expected} == expected
    assert state["temperature_c"] is None
    expected = {"driver": "580.1", "host_gpus": ["0, Card, 10 MiB, 100 MiB"]}
    expected["processes"] = [{"uuid": "GPU-1-a", "pid": 12, "memory_used_mib": 5}]
    assert {key: found[key] for key in expected} == expected
    smi.unlink()
    without = collect_environment()["cuda"]
    assert (without["driver"], without["gpu_states"], without["processes"]) == (None, None, None)


@pytest.mark.gpu
def test_device_memory_is_measured_reset_and_released():
    device = torch.device("cuda", torch.cuda.current_device())
    release_memory()
    reset_peak_memory(device)
    before_gib = measure_memory(device).allocated_gib
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert measure_memory(device).allocated_gib == pytest.approx(before_gib + 0.25)
    del block
    assert measure_memory(device).peak_allocated_gib == pytest.approx(before_gib + 0.25)
    reset_peak_memory(device)
    assert measure_memory(device).peak_allocated_gib == pytest.approx(before_gib)
    assert release_memory() == round(before_gib * 2**30)
    synchronize(device)
    found = collect_environment()["cuda"]
    assert (found["devices"][0]["memory_gib"] > 1, found["runtime"]) == (True, torch.version.cuda)


def test_hub_retries_are_kept_off_the_screen():
    quiet_libraries()
    assert not logging.getLogger("huggingface_hub").isEnabledFor(logging.WARNING)
    assert logging.getLogger("huggingface_hub").isEnabledFor(logging.ERROR)
