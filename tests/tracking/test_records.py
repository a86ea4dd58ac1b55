"""What a run's records hold beside its numbers: histograms, the artifact, system metrics, the objective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbexp.config import TrackingConfig
from cbexp.errors import ConfigError
from cbexp.tracking import compute_objective, start_tracking
from tests.tracking.wandb_fixtures import a_round, a_step, a_summary, read_back, start


def test_each_kind_of_step_has_a_histogram_in_which_every_step_of_a_burst_counts(run_dir):
    steps = [a_step("prefill", 1, 4.0), a_step("decode", 3, 3.0), a_step("decode", 1, 2.0)]
    with start(run_dir) as tracker:
        tracker.log_round(a_round(0), steps)
    assert tracker.warnings == []
    (row,) = read_back(run_dir).history
    names = {name.split("/")[1] for name in row if name.startswith("histograms/")}
    assert names == {"prefill_step_s", "decode_step_s"}
    counts, edges = (row[f"histograms/decode_step_s/{part}"] for part in ("values", "bins"))
    assert (counts[0], counts[-1], sum(counts)) == (3, 1, 4)
    assert (edges[0], edges[-1]) == (1.0, 2.0)
    assert row["histograms/decode_step_s/_type"] == "histogram"


def test_warmup_has_its_own_histograms(run_dir):
    with start(run_dir) as tracker:
        tracker.log_round(a_round(0, is_warmup=True), [a_step()])
    (row,) = read_back(run_dir).history
    assert "warmup/histograms/decode_step_s/values" in row
    assert not any(name.startswith("histograms/") for name in row)


def test_summary_and_configuration_are_an_artifact_whose_files_lie_in_the_run_folder(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    config = {"model": {"name": "tiny"}, "seed": 3}
    with start_tracking(TrackingConfig(mode="offline"), "n", None, config, Path("run")) as tracker:
        tracker.log_summary(a_summary(accuracy=None))
    assert tracker.warnings == []
    (artifact,) = read_back(run_dir).artifacts
    assert artifact.type == "records"
    paths = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(paths) == {"summary.json", "config.json"}
    assert json.loads(paths["summary.json"].read_text()) == a_summary(accuracy=None)
    assert json.loads(paths["config.json"].read_text()) == config
    assert list(run_dir.rglob("summary.json")) == [], "a report would take it for a second run"
    assert all(path.is_absolute() and path.is_relative_to(run_dir / "wandb") for path in paths.values())


def test_what_auto_became_is_part_of_the_configuration(run_dir):
    with start(run_dir) as tracker:
        tracker.log_resolved({"compile_mode": "eager"})
    assert tracker.warnings == []
    assert read_back(run_dir).config == {"seed": 1, "resolved": {"compile_mode": "eager"}}


def test_system_metrics_are_there_from_the_first_second(run_dir):
    with start(run_dir) as tracker:
        tracker.log_round(a_round(0), [])
    assert {"proc.memory.rssMB", "memory_percent"} <= read_back(run_dir).system_metrics


# The objective of a search


@pytest.mark.parametrize(
    ("peaks", "limit", "objective"),
    [
        ({"peak_reserved_gib": 10.0}, None, 100.0),
        ({"peak_reserved_gib": 10.0}, 10.0, 100.0),
        ({"peak_reserved_gib": 10.5}, 10.0, 0.0),
        ({"peak_reserved_gib": 8.0, "peak_host_gib": 90.0}, 10.0, 100.0),
        ({"peak_reserved_gib": None, "peak_host_gib": 1.5}, 2.0, 100.0),
        ({"peak_reserved_gib": None, "peak_host_gib": 1.5}, 1.0, 0.0),
    ],
)
def test_objective_is_throughput_within_the_memory_limit(peaks, limit, objective):
    assert compute_objective(a_summary(**peaks), limit) == objective


def test_unknown_memory_is_not_within_a_limit():
    summary = a_summary(peak_reserved_gib=None, peak_host_gib=None)
    assert compute_objective(summary, 10.0) == 0.0
    assert compute_objective(summary, None) == 100.0


@pytest.mark.parametrize(("limit", "objective"), [(None, 100.0), (1.0, 0.0)])
def test_objective_is_in_history_and_summary(run_dir, limit, objective):
    with start(run_dir, max_memory_gib=limit) as tracker:
        tracker.log_round(a_round(4), [])
        tracker.log_summary(a_summary())
    found = read_back(run_dir)
    (row,) = [row for row in found.history if "objective" in row]
    assert (row["objective"], row["round"]) == (objective, 4)
    assert found.summary["objective"] == objective
    assert found.summary["decode_tps"] == 100.0


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_memory_limit_that_nothing_can_keep_is_refused(limit):
    with pytest.raises(ConfigError, match=r"tracking.max_memory_gib=.* must be a number above 0"):
        TrackingConfig(max_memory_gib=limit)
