"""`wandb sync` of what was logged offline, run for real against a server on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import wandb

from cbexp.config import SweepInfo, TrackingConfig
from cbexp.tracking import start_tracking
from tests.tracking.wandb_fixtures import a_round, a_summary

CELL = SweepInfo("group", 1, 0)


def sync(*paths: Path | str) -> str:
    command = [Path(sys.executable).parent / "wandb", "sync", *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def log_rounds(run_dir: Path, *indices: int, sweep: SweepInfo | None = None, fails: bool = False) -> str:
    """Log rounds offline; returns what the tracker says about uploading."""
    tracker = start_tracking(TrackingConfig(mode="offline"), "seed=1", sweep, {"seed": 1}, run_dir)
    for index in indices:
        tracker.log_round(a_round(index), [])
    if not fails:
        tracker.log_summary(a_summary())
    tracker.finish(1 if fails else 0)
    wandb.teardown()
    return tracker.description


def rounds_of(rows: list[dict]) -> list[int]:
    return [row["round"] for row in rows if "wall_s" in row]


def test_offline_run_arrives_whole_and_in_order(run_dir, server):
    description = log_rounds(run_dir, *range(20))
    command = description.split("upload with: wandb sync ")[1]
    sync(command)
    ((run_id, rows),) = [(run_id, server.rows(run_id)) for run_id in server.history]
    assert rounds_of(rows) == list(range(20))
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert rows[-1]["objective"] == 100.0
    upsert = server.runs[run_id][0]
    assert json.loads(upsert["config"])["seed"]["value"] == 1
    assert upsert["displayName"] == "seed=1"
    assert server.exit_codes == {run_id: 0}
    assert [artifact["artifactTypeName"] for artifact in server.artifacts] == ["records"]


def test_sync_can_be_repeated(run_dir, server):
    log_rounds(run_dir, 0, 1)
    (folder,) = run_dir.glob("wandb/offline-run-*")
    sync(folder)
    (before,) = server.history.values()
    sync("--include-synced", folder)
    (after,) = server.history.values()
    assert rounds_of([json.loads(line) for line in after]) == [0, 1]
    assert len(after) == len(before)


def test_attempts_of_a_resumed_cell_are_one_run_in_order(tmp_path, server):
    """The second attempt knows nothing of the first; W&B puts one behind the other, by their time."""
    (tmp_path / "sweep.json").write_text('{"name": "n", "created_at": "2026-01-02T03:04:05+00:00"}')
    attempts = []
    for name, indices in (("0_seed=1", (0, 1)), ("0_seed=1.again", (0, 1, 2))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "cell.json").write_text('{"index": 0, "cell_hash": "h"}')
        log_rounds(folder, *indices, sweep=CELL, fails=len(indices) == 2)
        attempts += folder.glob("wandb/offline-run-*")
    sync(*reversed(attempts))
    ((run_id, rows),) = [(run_id, server.rows(run_id)) for run_id in server.history]
    assert rounds_of(rows) == [0, 1, 0, 1, 2]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert server.exit_codes[run_id] == 0


def test_cell_that_is_run_again_online_continues_its_run(tmp_path, server):
    (tmp_path / "sweep.json").write_text('{"name": "n", "created_at": "2026-01-02T03:04:05+00:00"}')
    for attempt, exit_code in (("a", 1), ("b", 0)):
        folder = tmp_path / attempt
        folder.mkdir()
        (folder / "cell.json").write_text('{"index": 0, "cell_hash": "h"}')
        tracker = start_tracking(TrackingConfig(mode="online"), "seed=1", CELL, {"seed": 1}, folder)
        tracker.log_round(a_round(0), [])
        tracker.finish(exit_code)
        assert tracker.warnings == []
    ((run_id, rows),) = [(run_id, server.rows(run_id)) for run_id in server.history]
    assert [row["_step"] for row in rows] == [0, 1]
    assert server.exit_codes[run_id] == 0


def test_run_begun_online_is_uploaded_by_the_command_that_is_named(run_dir, server):
    tracker = start_tracking(TrackingConfig(mode="online"), "seed=1", None, {}, run_dir)
    tracker.log_round(a_round(0), [])
    tracker.finish(0)
    wandb.teardown()
    (folder,) = run_dir.glob("wandb/run-*")
    server.history.clear()
    assert "No runs to sync" in sync(folder)
    sync("--include-online", "--include-synced", folder)
    ((_, lines),) = server.history.items()
    assert rounds_of([json.loads(line) for line in lines]) == [0]
