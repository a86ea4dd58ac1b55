"""The command as a user types it, with a real model: a run, a sweep, an interrupt, a reader that leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbexp.artifacts import read_jsonl
from tests.sweep.conftest import heed_signals

QUICK = ["tracking=disabled", "dataset.num_prompts=4", "num_rounds=1", "num_warmup_rounds=0"]
TIMEOUT_S = 600  # a guard


def run(tmp_path: Path, *arguments: str, **environment: str):
    return subprocess.run(
        [sys.executable, "-m", "cbexp", *arguments],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def read_summary(tmp_path: Path) -> dict:
    (path,) = tmp_path.glob("outputs/**/summary.json")
    return json.loads(path.read_text())


def test_run_leaves_stderr_clean_and_lines_short(tmp_path):
    done = run(tmp_path, *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_summary(tmp_path)["accuracy"] == 1.0
    assert all(len(line) <= 100 or str(tmp_path) in line for line in done.stdout.splitlines())


def test_sweep_runs_its_cells_in_processes_of_their_own(tmp_path):
    done = run(tmp_path, "-m", "sampling.ignore_eos=true", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_summary(tmp_path)["n_decoded_tokens"] == 4 * 96
    assert "1 of 1 cells are done" in done.stdout


@pytest.mark.parametrize(
    ("sent", "name"),
    [(signal.SIGINT, "Ctrl-C"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow)],
)
def test_interrupt_keeps_what_was_finished(tmp_path, sent, name):
    endless = ["tracking=disabled", "dataset.num_prompts=8", "num_rounds=10000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cbexp", *endless],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    pattern = "outputs/default/*/rounds.jsonl"
    try:
        while not any(len(path.read_text().splitlines()) >= 2 for path in tmp_path.glob(pattern)):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    (run_dir,) = (path.parent for path in tmp_path.glob(pattern))
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"INTERRUPTED: stopped by {name}" in errors
    assert json.loads((run_dir / "status.json").read_text())["status"] == "interrupted"
    assert not (run_dir / "summary.json").exists()
    rounds, num_torn = read_jsonl(run_dir / "rounds.jsonl")
    assert (len(rounds) >= 2, num_torn) == (True, 0)


@pytest.mark.parametrize("words", ["--help", pytest.param(" ".join(QUICK), marks=pytest.mark.slow)])
def test_reader_that_goes_away_breaks_nothing(tmp_path, words):
    pipeline = f"{sys.executable} -m cbexp {words} | true"
    done = subprocess.run(pipeline, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert done.stderr == b""
    assert words == "--help" or read_summary(tmp_path)["status"] == "completed"


def test_unsupported_transformers_is_one_line(tmp_path):
    package = tmp_path / "path" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this version does not fit its needs')")
    found = tmp_path / "path" / "transformers-5.17.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    search = os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])
    done = run(tmp_path, *QUICK, PYTHONPATH=search)
    assert done.returncode == 1
    assert done.stderr == "cbexp: transformers 5.17.0 is not supported: install >=5.24,<5.25.\n"
