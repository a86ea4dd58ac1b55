"""What makes figures doubtful, what the runs stood on, and whether they said the same."""

from __future__ import annotations

import pytest

from cbexp.report import load_runs
from cbexp.report.answers import same_completions_share
from cbexp.report.doubts import find_doubts
from cbexp.report.environments import find_differences, shared_facts
from tests.report.report_fixtures import load_one, write_json, write_lines


def gpu_environment(num_mib=4, pids=(), is_dirty=False, max_sm_mhz=1980):
    state = {
        "max_sm_mhz": max_sm_mhz,
        "max_memory_mhz": 3201,
        "power_limit_w": 700,
        "memory_used_mib": num_mib,
    }
    return {
        "versions": {"torch": "2.11.0"},
        "source": {"commit": "c" * 40, "is_dirty": is_dirty},
        "cuda": {
            "devices": [{"name": "NVIDIA H200"}],
            "gpu_states": [{"uuid": "GPU-1", **state}],
            "processes": [{"uuid": "GPU-1", "pid": pid, "memory_used_mib": 1} for pid in pids],
        },
    }


STEADY = {"walls_s": (1.0, 1.0, 1.0)}


@pytest.mark.parametrize(
    ("arguments", "doubt"),
    [
        ({"environment": gpu_environment(is_dirty=True)}, "uncommitted changes"),
        ({"environment": gpu_environment(pids=[1, 77])}, "1 other process(es) on the GPU"),
        ({"environment": gpu_environment(num_mib=30_000)}, "GPU memory in use when the run started: 29 GiB"),
        ({"walls_s": (1.0, 2.0, 3.0)}, "varies by more than ±5%"),
        ({"are_rounds_identical": False}, "completions differ between timed rounds"),
        ({"num_short": 2}, "ended below the fixed length"),
        ({"accuracy": 0.0, "num_judged": 12}, "accuracy means little"),
        ({"warnings": ["cache is small"]}, "cache is small"),
    ],
)
def test_doubts_are_found(make_run, arguments, doubt):
    doubts = find_doubts([load_one(make_run("1", **STEADY | arguments))])
    assert any(doubt in sentence for sentence in doubts), doubts


@pytest.mark.parametrize(
    "arguments",
    [
        {"environment": gpu_environment(pids=[1])},
        {"num_judged": 0},
        {"num_judged": 12, "is_fixed_length": False},
    ],
)
def test_a_clean_run_leaves_no_doubts(make_run, arguments):
    assert find_doubts([load_one(make_run("1", **STEADY | arguments))]) == {}


def test_shared_facts_and_differences_are_found(make_run):
    one, other = gpu_environment(), gpu_environment(max_sm_mhz=1200)
    other["versions"] = {"torch": "2.13.0"}
    other["variables"] = {"OMP_NUM_THREADS": "1"}
    not_recorded = make_run("3", status="failed")
    write_json(not_recorded / "environment.json", {})
    runs = load_runs([make_run("1", environment=one), make_run("2", environment=other), not_recorded])
    facts = {difference.fact: set(difference.values) for difference in find_differences(runs)}
    assert set(facts) == {"GPU clocks and power", "torch", "$OMP_NUM_THREADS"}
    assert facts["torch"] == {"2.11.0", "2.13.0"}
    assert facts["$OMP_NUM_THREADS"] == {"1", "not recorded"}
    assert shared_facts(runs)["GPU"] == "NVIDIA H200"


def test_completions_are_compared_request_by_request(make_run):
    one, other = make_run("1", digest="x"), make_run("2", digest="y")
    assert same_completions_share(*load_runs([one, make_run("3", digest="x")])) == 1.0
    assert same_completions_share(*load_runs([one, other])) is None
    for folder, digests in ((one, "aabb"), (other, "aabc")):
        rows = [{"round_index": index, "completion_digest": d} for index in (0, 1) for d in digests]
        write_lines(folder / "requests.jsonl", rows)
    assert same_completions_share(*load_runs([one, other])) == 0.75
