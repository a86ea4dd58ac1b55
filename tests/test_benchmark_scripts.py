"""The benchmark scripts, with a tiny model on a CPU, and the one that keeps measured runs."""

import csv
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_fixtures import TINY

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
SIZES = TINY | {"max_window_layers": 2, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2}
del SIZES["max_position_embeddings"]
TINY_OVERRIDES = [f"--override=model.architecture.{key}={value}" for key, value in SIZES.items()]


@pytest.fixture
def load_script(monkeypatch):
    """Import a script as its neighbours do."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def run_script(load_script, monkeypatch, tmp_path):
    """Run a script in `tmp_path` with arguments; returns what it exits with, None when it just ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            load_script(name).main()
        except SystemExit as end:
            return end.code
        return None

    return run


def test_steps_are_timed_in_every_shape(tmp_path, run_script):
    arguments = ["--output", "steps.json", "--models", "qwen3_0_6b", "--batches", 1, 3, "--contexts", 20, 300]
    options = ["--num-steps", 2, "--num-bursts", 3, "--only", "*/1/*", "*/3/20", *TINY_OVERRIDES]
    assert run_script("benchmark_steps", *arguments, *options) is None
    document = json.loads((tmp_path / "steps.json").read_text())
    rows = document["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 20), (1, 300), (3, 20)]
    for row in rows:
        assert row["min_step_ms"] <= row["step_ms"] <= row["max_step_ms"]
        assert row["output_tokens_per_s"] == pytest.approx(1000 * row["batch"] / row["step_ms"])
        assert row["kv_bytes"] == row["batch"] * row["context"] * 2 * (2 * 2 * 8 * 4)
        assert row["roofline_fraction"] is None  # a CPU has no bandwidth worth the name
    with (tmp_path / "steps.csv").open() as file:
        assert [row["context"] for row in csv.DictReader(file)] == ["20", "300", "20"]
    assert document["environment"]["versions"]["torch"] is not None
    assert "never overwritten" in run_script("benchmark_steps", *arguments)


def test_a_model_that_cannot_be_timed_is_a_row_with_its_error(tmp_path, run_script):
    options = ["--output", "x.json", "--models", "qwen3_0_6b", "--compile-mode", "cuda_graph"]
    assert run_script("benchmark_steps", *options, "--override", "model.device=cpu", *TINY_OVERRIDES) == 1
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert "needs a CUDA device" in row["error"]


def test_a_step_is_profiled(tmp_path, run_script, capsys):
    options = ["--model", "qwen3_0_6b", "--batch", 2, "--context", 40, "--num-steps", 2, "--output", "p.json"]
    assert run_script("profile_step", *options, *TINY_OVERRIDES) is None
    figures = json.loads((tmp_path / "p.json").read_text())
    by_name = {row["kernel"]: row for row in figures["kernels"]}
    # Seven projections a layer and the head, of which each step runs all.
    assert by_name["aten::mm"]["calls_per_step"] == 2 * 7 + 1
    parts = {row["part"]: row["bytes"] for row in figures["parts"]}
    assert parts["down projection"] == 2 * 48 * 32 * 4
    assert parts["head and embedding"] == 200 * 32 * 4
    printed = capsys.readouterr().out
    assert "Kernels of a step" in printed
    assert "Floor of each part" in printed


def test_kernels_are_counted_by_step_and_layer_and_told_apart_by_their_place(load_script):
    """Two steps of three layers: a product, attention, a product of the same name; then the head. Once, a fill."""
    profile = load_script("kernel_profile")
    events, now = [profile.KernelEvent("fill", 0.0, 100.0)], 200.0
    for _ in range(2):
        kernels = [("gemm", 10.0), ("paged_attention", 20.0), ("gemm", 30.0)] * 3 + [("head", 50.0)]
        for name, duration in kernels:
            events.append(profile.KernelEvent(name, now, duration))
            now += duration + 1.0
    rows = profile.summarize_kernels(events, num_steps=2, num_layers=3)
    names = ("kernel", "calls_per_step", "us_per_step", "us_per_layer")
    figures = [tuple(row[name] for name in names) for row in rows]
    assert figures == [("gemm", 6, 120, 40), ("paged_attention", 3, 60, 20), ("head", 1, 50, None)]
    rows = profile.summarize_layer(events, num_steps=2, num_layers=3)
    kernels = [(row["kernel"], row["us"]) for row in rows]
    assert kernels == [("paged_attention", 20), ("gemm", 30), ("gemm", 10)]
    assert all(row["gap_before_us"] == pytest.approx(1) for row in rows)


@pytest.fixture
def steps(tmp_path):
    row = {"model": "m", "compile_mode": "eager", "context": 500, "floor_ms": 1.0}
    rows = [row | {"batch": batch, "step_ms": 2.0 * batch} for batch in (1, 8)]
    failed = {"model": "n", "compile_mode": "eager", "error": "broken"}
    (tmp_path / "steps.json").write_text(json.dumps({"rows": [*rows, failed]}))
    return "steps.json"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_steps_are_drawn(tmp_path, run_script, steps):
    assert run_script("plot_steps", steps, "--output", "plots/steps.svg") is None
    assert (tmp_path / "plots/steps.svg").stat().st_size > 1000


# Keeping measured runs: what the report reads stays, paths of the machine do not


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
    paths = (tmp_path / "runs", "--into", tmp_path / "kept")
    command = [sys.executable, SCRIPTS / "collect_reference.py", *paths, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr


def test_records_are_kept_without_paths_never_overwritten_and_of_one_commit(tmp_path):
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
    write_job(tmp_path / "runs/sweep/0_other", commit="recorded")
    code, stderr = collect(tmp_path, "--commit", "abc123")
    assert code == 1
    assert "ran from recorded" in stderr
