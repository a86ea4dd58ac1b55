"""Warnings of jobs that will be slow: too large for a CPU or too small for its threads, a peer below its best."""

import pytest
import torch

from cbexp.model.attention_choice import AttentionChoice
from cbexp.model.memory import WeightSize
from cbexp.planning.plan_warnings import find_handicap, find_slowness

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "num_bytes", "num_threads", "expected"),
    [
        (CPU, 2**32, None, "takes minutes to hours"),
        (CPU, 2**20, None, "model.num_threads=1 is faster"),
        (CPU, 2**20, 4, None),
        (CPU, 2**28, None, None),
        (CUDA, 2**32, None, None),
        (CUDA, 2**20, None, None),
    ],
)
def test_slowness(device, num_bytes, num_threads, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    weights = WeightSize(num_parameters=num_bytes // 4, num_bytes=num_bytes)
    lines = find_slowness(device, weights, num_threads)
    assert len(lines) == (expected is not None)
    assert expected is None or expected in lines[0]


def test_one_core_needs_no_advice(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert find_slowness(CPU, WeightSize(num_parameters=10, num_bytes=40), None) == []


@pytest.mark.parametrize(
    ("driver", "attention", "device", "is_slow"),
    [
        ("manager", "sdpa", CUDA, True),
        ("manager", "flash_attention_3", CUDA, False),
        ("manager", "sdpa", CPU, False),
        ("generate", "sdpa", CUDA, False),
    ],
)
def test_a_manager_below_its_best_is_pointed_out(driver, attention, device, is_slow):
    lines = find_handicap(driver, AttentionChoice(attention), device)
    assert len(lines) == is_slow
    assert not lines or "driver=manager with sdpa attention runs without CUDA graphs" in lines[0]
