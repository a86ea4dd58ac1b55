"""`wandb sync` of what was logged offline, run for real against a server on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from cbexp.config import SweepInfo, TrackingConfig
from cbexp.tracking import start_tracking
from tests.tracking.wandb_fixtures import a_round, a_summary, make_cell, make_sweep

CELL = SweepInfo("group", 1, 0)


def sync(*paths: Path | str) -> None:
    command = [Path(sys.executable).parent / "wandb", "sync", *paths]
    subprocess.run(command, capture_output=True, timeout=600, check=True)


def log_rounds(
    run_dir: Path, *indices: int, sweep: SweepInfo | None = None, exit_code: int = 0, mode: str = "offline"
) -> str:
    """Log rounds; returns what the tracker says about uploading."""
    tracker = start_tracking(TrackingConfig(mode=mode), "seed=1", sweep, {"seed": 1}, run_dir)
    for index in indices:
        tracker.log_round(a_round(index), [])
    if exit_code == 0 and mode == "offline":
        tracker.log_summary(a_summary())
    tracker.finish(exit_code)
    assert tracker.warnings == []
    wandb.teardown()
    return tracker.description


def rounds_of(rows: list[dict]) -> list[int]:
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    return [row["round"] for row in rows if "wall_s" in row]


def rows_of_only_run(server) -> tuple[str, list[dict]]:
    (run_id,) = server.history
    return run_id, server.rows(run_id)


def test_offline_run_arrives_whole_and_in_order(run_dir, server):
    description = log_rounds(run_dir, *range(20))
    sync(description.split("upload with: wandb sync ")[1])
    run_id, rows = rows_of_only_run(server)
    assert rounds_of(rows) == list(range(20))
    assert rows[-1]["objective"] == 100.0
    upsert = server.runs[run_id][0]
    assert json.loads(upsert["config"])["seed"]["value"] == 1
    assert upsert["displayName"] == "seed=1"
    assert server.exit_codes == {run_id: 0}
    assert [artifact["artifactTypeName"] for artifact in server.artifacts] == ["records"]


@pytest.fixture
def attempts(tmp_path) -> list[Path]:
    """The folders of two attempts at the same cell of a sweep."""
    sweep_folder = make_sweep(tmp_path / "sweep")
    return [make_cell(sweep_folder, 0, name) for name in ("0_seed=1", "0_seed=1.again")]


@pytest.mark.slow
def test_attempts_of_a_resumed_cell_are_one_run_in_order(attempts, server):
    """The second attempt knows nothing of the first; W&B puts one behind the other, by their time."""
    log_rounds(attempts[0], 0, 1, sweep=CELL, exit_code=1)
    log_rounds(attempts[1], 0, 1, 2, sweep=CELL)
    sync(*(path for folder in reversed(attempts) for path in folder.glob("wandb/offline-run-*")))
    run_id, rows = rows_of_only_run(server)
    assert rounds_of(rows) == [0, 1, 0, 1, 2]
    assert server.exit_codes[run_id] == 0


def test_cell_that_is_run_again_online_continues_its_run(attempts, server):
    for folder, exit_code in zip(attempts, (1, 0), strict=True):
        log_rounds(folder, 0, sweep=CELL, exit_code=exit_code, mode="online")
    run_id, rows = rows_of_only_run(server)
    assert rounds_of(rows) == [0, 0]
    assert server.exit_codes[run_id] == 0


@pytest.mark.slow
def test_run_begun_online_is_uploaded_by_the_command_that_is_named(run_dir, server):
    log_rounds(run_dir, 0, mode="online")
    (folder,) = run_dir.glob("wandb/run-*")
    server.history.clear()
    sync("--include-online", "--include-synced", folder)
    assert rounds_of(rows_of_only_run(server)[1]) == [0]
