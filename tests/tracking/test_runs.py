"""W&B runs read back from disk: what a job's run holds, and what is left where wandb or the job breaks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import wandb

from cbexp import metrics
from cbexp.config import CacheConfig, DatasetConfig, ExperimentConfig, SweepInfo, TrackingConfig
from cbexp.engine import StepInfo
from cbexp.errors import NotApplicableError
from cbexp.experiment import run_experiment
from cbexp.tracking import compute_objective, start_tracking
from tests.tracking.conftest import KEY, REPOSITORY, ReadBack, a_round, a_summary, read_back, start

CONFIG = {"model": {"name": "tiny", "dtype": None}, "sampling": {"eos_token_ids": [1, 2]}, "seed": 3}
SUMMARY = a_summary(wall_s={"median": 1.5}, wall_times_s=[1.0, 2.0], accuracy=None)
ROUNDS = [a_round(0, is_warmup=True), a_round(1), a_round(2)]
STEPS = [
    StepInfo(kind, num_steps, 1, num_steps, 0, None, 0.0, duration_s, 0, 0, 0.5)
    for kind, num_steps, duration_s in (("prefill", 1, 4.0), ("decode", 3, 3.0), ("decode", 1, 2.0))
]
COMPLETIONS = [
    {"round_index": 0, "request_id": f"r{i}", "finish_reason": "eos", "verdict": None, "text": f"secret {i}"}
    for i in range(5)
]


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """A whole run, logged into a folder named relative to this one: its tracker and what can be read back."""
    launch = tmp_path / "launch"
    launch.mkdir()
    monkeypatch.chdir(launch)
    options = {"tags": ["a", "b"], "log_completions": True, "max_logged_completions": 2}
    config = TrackingConfig(mode="offline", project="my-project", entity="team", **options)
    sweep = SweepInfo("sweep-1", 2, 0)
    with start_tracking(config, "seed=3,compile=eager", sweep, CONFIG, Path("run")) as tracker:
        tracker.log_resolved({"compile_mode": "eager"})
        for record in ROUNDS:
            tracker.log_round(record, STEPS)
        tracker.log_completions([row | {"prompt_ids": [2]} for row in COMPLETIONS])
        tracker.log_summary(SUMMARY)
    return tracker, read_back(launch / "run")


def test_run_has_its_names_configuration_and_rounds(logged):
    tracker, found = logged
    assert tracker.warnings == []
    assert (found.run.project, found.run.entity, found.run.run_group) == ("my-project", "team", "sweep-1")
    assert (found.run.display_name, list(found.run.tags)) == ("seed=3,compile=eager", ["a", "b"])
    assert found.config == CONFIG | {"resolved": {"compile_mode": "eager"}}
    assert found.exit_code == 0
    assert any(item.key == "proc.memory.rssMB" for stats in found.records["stats"] for item in stats.item)

    rows = [row for row in found.history if "wall_s" in row or "warmup/wall_s" in row]
    for row, record, prefix in zip(rows, ROUNDS, ("warmup/", "", ""), strict=True):
        numbers = metrics.flatten_numbers(record.to_dict())
        assert {f"{prefix}{name}": value for name, value in numbers.items()}.items() <= row.items()
        assert row["round"] == record.round_index
        assert f"{prefix}histograms/prefill_step_s/_type" in row
    assert rows[1]["ttft_s/p50"] == 1.0
    (glob,) = [metric for metric in found.records["metric"] if metric.glob_name == "*"]
    assert glob.step_metric == "round"
    # Every step of a burst counts, with its share of the time.
    counts, edges = (rows[1][f"histograms/decode_step_s/{part}"] for part in ("values", "bins"))
    assert (counts[0], counts[-1], sum(counts), edges[0], edges[-1]) == (3, 1, 4, 1.0, 2.0)


def test_run_has_its_summary_records_and_as_many_completions_as_allowed(logged):
    tracker, found = logged
    assert {key: found.summary[key] for key in SUMMARY} == SUMMARY
    assert "output_tokens_per_s" not in found.summary, "of the last round"
    (row,) = [row for row in found.history if "objective" in row]
    assert (row["objective"], row["round"], found.summary["objective"]) == (100.0, 2, 100.0)

    launch = Path.cwd()
    beginning, folder = tracker.description.split("wandb sync ")
    assert beginning == "W&B offline (as configured); upload with: "
    assert folder.startswith("run/wandb/offline-run-") and list((launch / folder).glob("*.wandb"))
    assert [path.name for path in launch.iterdir()] == ["run"]
    (path,) = launch.glob(f"{folder}/files/media/table/*.json")
    table = json.loads(path.read_text())
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == COMPLETIONS[:2]

    (artifact,) = [item for item in found.records["artifact"] if item.type == "records"]
    paths = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    records = {name: json.loads(path.read_text()) for name, path in paths.items()}
    assert records == {"summary.json": SUMMARY, "config.json": found.config}
    assert all(path.is_absolute() and path.is_relative_to(launch / "run/wandb") for path in paths.values())
    assert list(launch.rglob("summary.json")) == [], "a report would take it for a second run"


def test_jobs_at_the_same_time_do_not_share_a_run_and_print_nothing(tmp_path, capfd):
    """Names are cut to what W&B takes; completions stay private unless asked for."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    config, sweep = TrackingConfig(mode="offline"), SweepInfo("g" * 300, 1, 0)
    with start_tracking(config, "x" * 300, sweep, {}, folders[0]) as one, start(folders[1]) as other:
        one.log_round(a_round(0), [])
        other.log_round(a_round(1), [])
        one.log_completions(COMPLETIONS)
    first, second = (read_back(folder) for folder in folders)
    assert first.run.run_id != second.run.run_id
    assert (first.rounds, second.rounds) == ([0], [1])
    assert len(first.run.display_name) == len(first.run.run_group) == 128
    assert not any(b"secret" in path.read_bytes() for path in folders[0].rglob("*") if path.is_file())
    assert capfd.readouterr() == ("", "")


# The objective of a search


@pytest.mark.parametrize(
    ("reserved", "host", "limit", "objective"),
    [
        (10.5, 1.0, 10.0, 0.0),
        (8.0, 90.0, 10.0, 100.0),
        (None, 1.5, 1.0, 0.0),
        (None, None, 10.0, 0.0),  # unknown memory is not within a limit
    ],
)
def test_objective_is_throughput_within_the_memory_limit(reserved, host, limit, objective):
    summary = a_summary(peak_reserved_gib=reserved, peak_host_gib=host)
    assert compute_objective(summary, limit) == objective


# What breaks


@pytest.mark.parametrize(
    ("error", "exit_code", "objectives"),
    [
        (ValueError("bad"), 1, [0.0]),
        (KeyboardInterrupt("stop"), 255, []),
        (NotApplicableError("no GPU"), 0, [0.0]),
    ],
)
def test_run_of_a_job_that_ends_badly_says_how_and_is_worth_nothing(run_dir, error, exit_code, objectives):
    with pytest.raises(type(error)), start(run_dir) as tracker:
        tracker.log_round(a_round(0), [])
        raise error
    found = read_back(run_dir)
    assert found.exit_code == exit_code
    assert (found.summary["error_class"], found.summary["message"]) == (type(error).__name__, str(error))
    assert [row["objective"] for row in found.history if "objective" in row] == objectives
    assert found.summary.get("objective") == (objectives[0] if objectives else None)


def test_job_that_does_not_fit_is_a_run_that_is_worth_nothing(tmp_path, monkeypatch):
    """It ends before anything runs."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep7")
    config = ExperimentConfig(
        dataset=DatasetConfig(num_prompts=4),
        cache=CacheConfig(num_tokens=10**11),
        tracking=TrackingConfig(mode="offline"),
    )
    assert run_experiment(config, tmp_path / "run", []).status == "out_of_memory"
    found = read_back(tmp_path / "run")
    assert (found.run.sweep_id, found.exit_code, found.summary["objective"]) == ("sweep7", 1, 0.0)


def test_failures_of_wandb_are_counted_and_end_nothing(run_dir, monkeypatch):
    def fail(*_arguments: object) -> None:
        raise RuntimeError("broken pipe")

    with start(run_dir, max_memory_gib=1.0) as tracker:
        tracker.log_summary(a_summary())
        monkeypatch.setattr(wandb.Run, "log", fail)
        tracker.log_round(a_round(0), [])
        tracker.log_round(a_round(1), [])
        tracker.finish(exit_code=3)  # the first one given
    assert tracker.warnings == ["W&B: logging a round failed (RuntimeError: broken pipe) (2 times)"]
    found = read_back(run_dir)
    assert (found.exit_code, found.summary["objective"]) == (3, 0.0)  # it needs more than 1 GiB


LOGGING_SCRIPT = """
import sys
from pathlib import Path
from tests.tracking.conftest import a_round, start
tracker = start(Path(sys.argv[1]))
for index in range(5):
    tracker.log_round(a_round(index), [])
sys.stdin.read()
"""


def test_rounds_are_on_disk_before_a_process_that_is_killed_ends(run_dir):
    """Killed together with wandb's own process, as a machine that goes down would."""
    command = [sys.executable, "-c", LOGGING_SCRIPT, run_dir]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=REPOSITORY)
    try:
        while sum(len(ReadBack(path).history) for path in run_dir.glob("wandb/*/*.wandb")) < 5:
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
            victim.kill()
        process.communicate()
    found = read_back(run_dir)
    assert (found.rounds, found.config, found.records["exit"]) == ([0, 1, 2, 3, 4], {"seed": 1}, [])


# With a server


@pytest.mark.usefixtures("server")
def test_online_run_names_its_page_prints_nothing_and_leaks_no_key(run_dir, capfd):
    with start(run_dir, mode="auto") as tracker:
        tracker.log_round(a_round(0), [])
    assert tracker.warnings == []
    assert tracker.description.startswith("W&B online (credentials found); http://127.0.0.1:")
    assert "/team/project/runs/" in tracker.description
    assert capfd.readouterr() == ("", "")
    assert not any(KEY.encode() in path.read_bytes() for path in run_dir.rglob("*") if path.is_file())


@pytest.mark.slow
def test_server_lost_in_the_middle_loses_no_round(run_dir, server, monkeypatch):
    """wandb asks the server for 20 seconds before it gives up on an artifact."""
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")
    wandb.teardown()
    with start(run_dir, mode="online") as tracker:
        tracker.log_round(a_round(0), [])
        server.shutdown()
        server.server_close()
        tracker.log_round(a_round(1), [])
        tracker.log_summary(a_summary())
    refused, unfinished = tracker.warnings
    assert refused.startswith("W&B: logging the records failed (")
    command = r"wandb sync --include-online \S+/run-\S+$"
    assert re.search(rf"finishing the run took too long; the data is kept: {command}", unfinished)
    found = read_back(run_dir, "run-*")
    assert (found.rounds, found.summary["objective"]) == ([0, 1], 100.0)
    saved = {item.path for files in found.records["files"] for item in files.files}
    assert {"records/run-summary.json", "records/run-config.json"} <= saved
