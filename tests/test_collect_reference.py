"""Keeping measured runs: what the report reads stays, paths of the machine do not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "collect_reference.py"


def write_job(folder: Path, status: str = "completed", commit: str | None = None) -> None:
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"status": status}))
    command = "python -m cbexp model=hf model.name_or_path=org/Name driver.pythonpath=/tmp/a/site"
    (folder / "cell.json").write_text(json.dumps({"command": command}))
    (folder / "engine.json").write_text(
        json.dumps({"model": "/root/.cache/x/178e", "share": "3/4", "home": "~/y/z"})
    )
    (folder / "environment.json").write_text(json.dumps({"source": {"commit": commit, "is_dirty": None}}))
    (folder / "rounds.jsonl").write_text('{"round_index": 0, "unit": "tokens/s"}\n')
    (folder / "completions.jsonl").write_text('{"text": "large"}\n')
    if status == "completed":
        (folder / "summary.json").write_text('{"model": "org/Name"}')


def collect(*arguments: object):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


def read(path: Path):
    return json.loads(path.read_text())


def test_records_are_kept_without_paths(tmp_path):
    write_job(tmp_path / "runs/sweep/0_sync")
    write_job(tmp_path / "runs/1_broken_off", status="running")
    done = collect(tmp_path / "runs", "--into", tmp_path / "kept", "--commit", "abc123")
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "kept/0_sync"
    names = {"cell.json", "engine.json", "environment.json", "rounds.jsonl", "status.json", "summary.json"}
    assert {path.name for path in kept.iterdir()} == names
    command = "python -m cbexp model=hf model.name_or_path=org/Name driver.pythonpath=site"
    assert read(kept / "cell.json") == {"command": command}
    assert read(kept / "engine.json") == {"model": "178e", "share": "3/4", "home": "z"}
    assert read(kept / "environment.json")["source"] == {"commit": "abc123", "is_dirty": False}
    assert (kept / "rounds.jsonl").read_text() == '{"round_index": 0, "unit": "tokens/s"}\n'
    assert not (tmp_path / "kept/1_broken_off/summary.json").exists()


def test_nothing_is_overwritten(tmp_path):
    write_job(tmp_path / "runs/0")
    assert collect(tmp_path / "runs", "--into", tmp_path / "kept").returncode == 0
    again = collect(tmp_path / "runs", "--into", tmp_path / "kept")
    assert again.returncode == 1
    assert "never overwritten" in again.stderr


@pytest.mark.parametrize(
    ("folders", "message"), [((), "no job"), (("a/0", "b/0"), "folders of the same name")]
)
def test_what_cannot_be_kept_is_refused(tmp_path, folders, message):
    (tmp_path / "runs").mkdir()
    for folder in folders:
        write_job(tmp_path / "runs" / folder)
    done = collect(tmp_path / "runs", "--into", tmp_path / "kept")
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "kept").exists()


def test_another_commit_than_the_recorded_one_is_refused(tmp_path):
    write_job(tmp_path / "runs/0", commit="recorded")
    done = collect(tmp_path / "runs", "--into", tmp_path / "kept", "--commit", "abc123")
    assert done.returncode == 1
    assert "ran from recorded" in done.stderr
