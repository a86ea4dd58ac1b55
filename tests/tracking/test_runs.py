"""W&B runs read back from disk: what a job's run holds, and what is left where wandb or the job breaks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import wandb

from cbexp import metrics
from cbexp.config import SweepInfo, TrackingConfig
from cbexp.engine import StepInfo
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.tracking import compute_objective, start_tracking
from tests.tracking.wandb_fixtures import (
    KEY,
    REPOSITORY,
    a_round,
    a_summary,
    clean_machine,
    make_cell,
    make_sweep,
    read_back,
    read_so_far,
    start,
)

CONFIG = {"model": {"name": "tiny", "dtype": None}, "sampling": {"eos_token_ids": [1, 2]}, "seed": 3}
SUMMARY = a_summary(wall_s={"median": 1.5}, wall_times_s=[1.0, 2.0], accuracy=None)
ROUNDS = [a_round(0, is_warmup=True), a_round(1), a_round(2)]
STEPS = [
    StepInfo(kind, num_steps, 1, num_steps, 0, None, 0.0, duration_s, 0, 0, 0.5)
    for kind, num_steps, duration_s in (("prefill", 1, 4.0), ("decode", 3, 3.0), ("decode", 1, 2.0))
]
COMPLETIONS = [
    {
        "round_index": 0,
        "request_id": f"req_{i}",
        "finish_reason": "eos",
        "verdict": None,
        "text": f"secret {i}",
    }
    for i in range(5)
]


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> SimpleNamespace:
    """A whole run, logged into a relative folder: its folder, its tracker, and what can be read back."""
    launch = tmp_path_factory.mktemp("launch")
    with clean_machine(tmp_path_factory.mktemp("machine")) as patch:
        patch.chdir(launch)
        options = {"tags": ["a", "b"], "log_completions": True, "max_logged_completions": 2}
        config = TrackingConfig(mode="offline", project="my-project", entity="team", **options)
        sweep = SweepInfo("sweep-1", 2, 0)
        with start_tracking(config, "seed=3,compile=eager", sweep, CONFIG, Path("run")) as tracker:
            tracker.log_resolved({"compile_mode": "eager"})
            for record in ROUNDS:
                tracker.log_round(record, STEPS)
            tracker.log_completions([row | {"prompt_ids": [2]} for row in COMPLETIONS])
            tracker.log_summary(SUMMARY)
        return SimpleNamespace(launch=launch, tracker=tracker, found=read_back(launch / "run"))


def test_run_has_its_names_and_its_configuration(logged):
    run = logged.found.run
    assert logged.tracker.warnings == []
    assert (run.project, run.entity, run.run_group) == ("my-project", "team", "sweep-1")
    assert (run.display_name, list(run.tags)) == ("seed=3,compile=eager", ["a", "b"])
    assert logged.found.config == CONFIG | {"resolved": {"compile_mode": "eager"}}
    assert logged.found.exit_code == 0
    assert {"proc.memory.rssMB", "memory_percent"} <= logged.found.system_metrics


def test_every_number_of_a_round_is_logged_against_it(logged):
    rows = [row for row in logged.found.history if "wall_s" in row or "warmup/wall_s" in row]
    for row, record, prefix in zip(rows, ROUNDS, ("warmup/", "", ""), strict=True):
        numbers = metrics.flatten_numbers(record.to_dict())
        expected = {f"{prefix}{name}": value for name, value in numbers.items()}
        assert expected.items() <= row.items()
        others = {name for name in row if name not in expected and not name.startswith("_")}
        assert {name.split("histograms/")[0] for name in others - {"round"}} == {prefix}
        assert row["round"] == record.round_index
    assert rows[1]["ttft_s/p50"] == 1.0
    (glob,) = [metric for metric in logged.found.metrics if metric.glob_name == "*"]
    assert glob.step_metric == "round"


def test_each_kind_of_step_has_a_histogram_in_which_every_step_of_a_burst_counts(logged):
    row = logged.found.history[1]
    assert {name.split("/")[1] for name in row if name.startswith("histograms/")} == {
        "prefill_step_s",
        "decode_step_s",
    }
    counts, edges = (row[f"histograms/decode_step_s/{part}"] for part in ("values", "bins"))
    assert (counts[0], counts[-1], sum(counts)) == (3, 1, 4)
    assert (edges[0], edges[-1]) == (1.0, 2.0)
    assert row["histograms/decode_step_s/_type"] == "histogram"


def test_summary_is_the_runs_and_not_the_last_rounds(logged):
    found = logged.found
    assert {key: found.summary[key] for key in SUMMARY} == SUMMARY
    assert "output_tokens_per_s" not in found.summary
    (row,) = [row for row in found.history if "objective" in row]
    assert (row["objective"], row["round"], found.summary["objective"]) == (100.0, 2, 100.0)


def test_summary_and_configuration_are_an_artifact_whose_files_lie_in_the_run_folder(logged):
    (artifact,) = [artifact for artifact in logged.found.artifacts if artifact.type == "records"]
    paths = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(paths) == {"summary.json", "config.json"}
    assert json.loads(paths["summary.json"].read_text()) == SUMMARY
    assert json.loads(paths["config.json"].read_text()) == logged.found.config
    folder = logged.launch / "run"
    assert list(folder.rglob("summary.json")) == [], "a report would take it for a second run"
    assert all(path.is_absolute() and path.is_relative_to(folder / "wandb") for path in paths.values())


def test_offline_says_how_to_upload_it_from_the_launch_folder_which_stays_clean(logged):
    command = re.search(
        r"W&B offline \(as configured\); upload with: wandb sync (\S+)$", logged.tracker.description
    )
    assert command[1].startswith("run/wandb/offline-run-")
    assert list((logged.launch / command[1]).glob("*.wandb"))
    assert [path.name for path in logged.launch.iterdir()] == ["run"]


def test_completions_are_logged_up_to_the_limit_when_asked_for(logged):
    tables = logged.launch.glob("run/wandb/offline-run-*/files/media/table/*.json")
    (table,) = [json.loads(path.read_text()) for path in tables]
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == COMPLETIONS[:2]


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
    assert [[row["round"] for row in found.history] for found in (first, second)] == [[0], [1]]
    assert len(first.run.display_name) == len(first.run.run_group) == 128
    assert first.run.display_name.endswith("x…")
    assert not any(b"secret" in path.read_bytes() for path in folders[0].rglob("*") if path.is_file())
    assert capfd.readouterr() == ("", "")


# The objective of a search


@pytest.mark.parametrize(
    ("peaks", "limit", "objective"),
    [
        ((10.0, None), None, 100.0),
        ((10.0, None), 10.0, 100.0),
        ((10.5, None), 10.0, 0.0),
        ((8.0, 90.0), 10.0, 100.0),
        ((None, 1.5), 2.0, 100.0),
        ((None, 1.5), 1.0, 0.0),
        ((None, None), 10.0, 0.0),  # unknown memory is not within a limit
        ((None, None), None, 100.0),
    ],
)
def test_objective_is_throughput_within_the_memory_limit(peaks, limit, objective):
    summary = a_summary(peak_reserved_gib=peaks[0], peak_host_gib=peaks[1])
    assert compute_objective(summary, limit) == objective


@pytest.mark.parametrize("limit", [0.0, float("nan")])
def test_memory_limit_that_nothing_can_keep_is_refused(limit):
    with pytest.raises(ConfigError, match=r"tracking.max_memory_gib=.* must be a number above 0"):
        TrackingConfig(max_memory_gib=limit)


# What breaks


@pytest.mark.parametrize(
    ("error", "exit_code", "objective"),
    [
        (ValueError("bad"), 1, 0.0),
        (KeyboardInterrupt("stop"), 255, None),
        (NotApplicableError("no GPU"), 0, 0.0),
    ],
)
def test_run_of_a_job_that_ends_badly_says_how_and_is_worth_nothing(run_dir, error, exit_code, objective):
    with pytest.raises(type(error)), start(run_dir) as tracker:
        tracker.log_round(a_round(0), [])
        raise error
    found = read_back(run_dir)
    assert found.exit_code == exit_code
    assert (found.summary["error_class"], found.summary["message"]) == (type(error).__name__, str(error))
    assert found.summary.get("objective") == objective
    logged = [row["objective"] for row in found.history if "objective" in row]
    assert logged == ([] if objective is None else [objective])


def test_failures_of_wandb_are_counted_and_end_nothing(run_dir, monkeypatch):
    with start(run_dir, max_memory_gib=1.0) as tracker:
        tracker.log_summary(a_summary())

        def fail(*_arguments: object) -> None:
            raise RuntimeError("broken pipe")

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
from tests.tracking.wandb_fixtures import a_round, start
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
        while not list(run_dir.glob("wandb/offline-run-*/*.wandb")) or len(read_so_far(run_dir).history) < 5:
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
            victim.kill()
        process.communicate()
    found = read_back(run_dir)
    assert [row["round"] for row in found.history] == [0, 1, 2, 3, 4]
    assert found.config == {"seed": 1}
    assert found.exit_code is None


# Online


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
    tracker = start(run_dir, mode="online")
    tracker.log_round(a_round(0), [])
    server.stop()
    tracker.log_round(a_round(1), [])
    tracker.log_summary(a_summary(decode_tps=1.0))
    tracker.finish(0)
    refused, unfinished = tracker.warnings
    assert refused.startswith("W&B: logging the records failed (")
    command = r"wandb sync --include-online \S+/run-\S+$"
    assert re.search(rf"finishing the run took too long; the data is kept: {command}", unfinished)
    found = read_back(run_dir, "run-*")
    assert [row["round"] for row in found.history if "wall_s" in row] == [0, 1]
    assert found.summary["decode_tps"] == found.summary["objective"] == 1.0
    assert {"records/run-summary.json", "records/run-config.json"} <= found.saved_files


def sync(*paths: Path | str) -> None:
    """Run `wandb sync` for real."""
    command = [Path(sys.executable).parent / "wandb", "sync", *paths]
    subprocess.run(command, capture_output=True, timeout=600, check=True)


def rounds_that_arrived(server) -> list[int]:
    (rows,) = map(server.rows, server.history)
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    return [row["round"] for row in rows if "wall_s" in row]


def test_offline_run_arrives_whole_and_in_order(run_dir, server):
    with start(run_dir) as tracker:
        for index in range(20):
            tracker.log_round(a_round(index), [])
        tracker.log_summary(a_summary())
    wandb.teardown()
    sync(tracker.description.split("upload with: wandb sync ")[1])
    assert rounds_that_arrived(server) == list(range(20))
    (run_id,) = server.history
    assert server.rows(run_id)[-1]["objective"] == 100.0
    upsert = server.runs[run_id][0]
    assert (json.loads(upsert["config"])["seed"]["value"], upsert["displayName"]) == (1, "seed=1")
    assert server.exit_codes == {run_id: 0}
    assert [artifact["artifactTypeName"] for artifact in server.artifacts] == ["records"]


@pytest.mark.slow
def test_attempts_of_a_resumed_cell_are_one_run_in_order(tmp_path, server):
    """The second attempt knows nothing of the first; W&B puts one behind the other, by their time."""
    sweep_folder, config = make_sweep(tmp_path / "sweep"), TrackingConfig(mode="offline")
    for attempt, num_rounds in (("0_seed=1", 2), ("0_seed=1.again", 3)):
        folder = make_cell(sweep_folder, 0, attempt)
        with start_tracking(config, "seed=1", SweepInfo("group", 1, 0), {}, folder) as tracker:
            for index in range(num_rounds):
                tracker.log_round(a_round(index), [])
        wandb.teardown()
    sync(*sorted(sweep_folder.glob("*/wandb/offline-run-*"), reverse=True))
    assert rounds_that_arrived(server) == [0, 1, 0, 1, 2]
