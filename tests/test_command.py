"""The command as a user types it: a sweep, an interrupt, a kill, a full disk; each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbexp.artifacts import read_jsonl

QUICK = ["tracking=disabled", "dataset.num_prompts=4", "num_rounds=1", "num_warmup_rounds=0"]
ENDLESS = ["tracking=disabled", "dataset.num_prompts=8", "num_rounds=10000", "num_warmup_rounds=0"]


def cbexp(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cbexp", *arguments]


def run(tmp_path: Path, *arguments: str, **environment: str):
    return subprocess.run(
        cbexp(*arguments),
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def start_endless(tmp_path: Path, min_rounds: int = 2) -> tuple[subprocess.Popen, Path]:
    """Start a run that does not end by itself and wait until it has written some rounds."""
    process = subprocess.Popen(
        cbexp(*ENDLESS), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = list(tmp_path.glob("outputs/default/*/rounds.jsonl"))
        if found and len(found[0].read_text().splitlines()) >= min_rounds:
            return process, found[0].parent
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no rounds were written: {process.communicate()}")


def run_dirs(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in tmp_path.glob("outputs/**/status.json"))


def test_sweep_of_two_jobs(tmp_path):
    done = run(tmp_path, "-m", "sampling.ignore_eos=false,true", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    jobs = run_dirs(tmp_path)
    assert len(jobs) == 2
    assert len({job.parent for job in jobs}) == 1
    natural, fixed = (json.loads((job / "summary.json").read_text()) for job in jobs)
    assert (natural["is_fixed_length"], fixed["is_fixed_length"]) == (False, True)
    assert natural["workload_hash"] != fixed["workload_hash"]
    assert fixed["n_decoded_tokens"] == 4 * 96
    assert natural["accuracy"] == 1.0
    assert "completed" in done.stdout


def test_good_run_leaves_stderr_clean_and_ends_at_once(tmp_path):
    done = run(tmp_path, *QUICK)
    ended_s = time.time()
    assert done.returncode == 0
    assert done.stderr == ""
    (run_dir,) = run_dirs(tmp_path)
    # 5 s is the promise on an idle machine.
    assert ended_s - (run_dir / "summary.json").stat().st_mtime < 15
    assert all(len(line) <= 100 or str(tmp_path) in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_at_once_and_keeps_what_was_finished(tmp_path, sent):
    process, run_dir = start_endless(tmp_path)
    sent_s = time.time()
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    # Half a second on an idle machine, and tests share theirs; the interpreter takes its time to go.
    assert (run_dir / "status.json").stat().st_mtime - sent_s < 3
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"INTERRUPTED: stopped by {'SIGTERM' if sent == signal.SIGTERM else 'Ctrl-C'}" in errors
    assert json.loads((run_dir / "status.json").read_text())["status"] == "interrupted"
    assert not (run_dir / "summary.json").exists()
    rounds, num_torn = read_jsonl(run_dir / "rounds.jsonl")
    assert len(rounds) >= 2
    assert num_torn == 0


def test_kill_loses_no_finished_round(tmp_path):
    process, run_dir = start_endless(tmp_path)
    before = len(read_jsonl(run_dir / "rounds.jsonl")[0])
    process.kill()
    process.communicate(timeout=20)
    rounds, _ = read_jsonl(run_dir / "rounds.jsonl")
    requests, _ = read_jsonl(run_dir / "requests.jsonl")
    assert len(rounds) >= before >= 2
    assert {r["round_index"] for r in rounds} <= {r["round_index"] for r in requests}
    assert json.loads((run_dir / "status.json").read_text())["status"] == "running"


def test_two_runs_at_once_do_not_collide(tmp_path):
    processes = [
        subprocess.Popen(cbexp(*QUICK), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({job.name for job in run_dirs(tmp_path)}) == 2


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["modle=tiny"], 2, "model"),
        (["model=hf", "model.name_or_path=/no/such/folder"], 1, "/no/such/folder"),
        (["model=hf", "model.name_or_path=no/such-model"], 1, "no/such-model"),
        (["compile=default", "driver=generate"], 2, "driver=generate"),
        (["compile=cuda_graph", "driver=manager"], 3, "CUDA graphs"),
        (["model.device=cuda"], 1, "CUDA"),
        (["dataset=jsonl", "dataset.path=missing.jsonl"], 1, "missing.jsonl"),
        (["cache.num_tokens=64"], 2, "cache.num_tokens"),
        (["tracking=online", "WANDB_API_KEY=", "WANDB_MODE=online"], 2, "WANDB_API_KEY"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_message(tmp_path, arguments, exit_code, message):
    environment = dict(a.split("=", 1) for a in arguments if a.startswith("WANDB"))
    quick = [a for a in QUICK if not (a == "tracking=disabled" and "tracking=online" in arguments)]
    overrides = [a for a in arguments if not a.startswith("WANDB")]
    done = run(tmp_path, *quick, *overrides, HOME=str(tmp_path), **environment)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert message in done.stderr


def test_dry_run_says_what_fits(tmp_path):
    done = run(tmp_path, "dry_run=true", "model=qwen3_4b", "model.init=random", "experiment=rollout_32")
    assert done.returncode == 0, done.stderr
    assert "4,022,468,096 parameters" in done.stdout
    assert f"{36 * 2 * 8 * 128 * 4:,} bytes" in done.stdout  # layers x (K, V) x heads x head size x float32


def test_reader_that_goes_away_breaks_nothing(tmp_path):
    shell = f"{sys.executable} -m cbexp {' '.join(QUICK)} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 0
    (run_dir,) = run_dirs(tmp_path)
    assert json.loads((run_dir / "status.json").read_text())["status"] == "completed"
    assert (run_dir / "summary.json").exists()


def test_help_into_a_reader_that_goes_away(tmp_path):
    shell = f"{sys.executable} -m cbexp --help | true"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


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


def test_run_folder_that_is_a_file_is_one_message(tmp_path):
    (tmp_path / "taken").write_text("")
    done = run(tmp_path, *QUICK, "hydra.run.dir=taken")
    assert done.returncode == 1
    assert done.stderr.startswith("cbexp: results cannot be written to taken: it is a file.")
    assert "Traceback" not in done.stderr
