"""Keeping measured runs: what the report reads stays, paths of the machine do not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "collect_reference.py"
ROUNDS = '{"round_index": 0, "unit": "tokens/s"}\n'
COMMAND = "python -m cbexp model=hf model.name_or_path=org/Name driver.pythonpath="


def write_job(folder: Path, commit: str | None = None) -> None:
    files = {
        "status.json": {"status": "completed"},
        "cell.json": {"command": f"{COMMAND}/tmp/a/site"},
        "engine.json": {"model": "/root/.cache/x/178e", "share": "3/4", "home": "~/y/z"},
        "environment.json": {"source": {"commit": commit, "is_dirty": None}},
        "summary.json": {"model": "org/Name"},
        "completions.jsonl": {"text": "large"},
    }
    folder.mkdir(parents=True)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    (folder / "rounds.jsonl").write_text(ROUNDS)


def collect(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, SCRIPT, tmp_path / "runs", "--into", tmp_path / "kept", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr


def test_records_are_kept_without_paths_and_never_overwritten(tmp_path):
    write_job(tmp_path / "runs/sweep/0_sync")
    assert collect(tmp_path, "--commit", "abc123") == (0, "")
    kept = {path.name: path.read_text() for path in (tmp_path / "kept/0_sync").iterdir()}
    assert kept.pop("rounds.jsonl") == ROUNDS
    assert {name: json.loads(text) for name, text in kept.items()} == {
        "status.json": {"status": "completed"},
        "cell.json": {"command": f"{COMMAND}site"},
        "engine.json": {"model": "178e", "share": "3/4", "home": "z"},
        "environment.json": {"source": {"commit": "abc123", "is_dirty": False}},
        "summary.json": {"model": "org/Name"},
    }
    code, stderr = collect(tmp_path)
    assert code == 1
    assert "never overwritten" in stderr


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ((), "no job"),
        (("a/0", "b/0"), "folders of the same name"),
        (("0",), "ran from recorded"),  # not from the commit that is named
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, folders, message):
    (tmp_path / "runs").mkdir()
    for folder in folders:
        write_job(tmp_path / "runs" / folder, commit="recorded")
    code, stderr = collect(tmp_path, "--commit", "abc123")
    assert code == 1
    assert message in stderr
