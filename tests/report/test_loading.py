"""Runs are read in whatever state their folders are, and nothing that is there is left out."""

from __future__ import annotations

import errno
import json
import math
import os
import socket

import pytest

from cbexp.report import ReportError, format_table, load_runs, run_rows
from cbexp.report.page import build_page
from cbexp.report.table import format_json
from tests.report.report_fixtures import REFERENCE, load_one, round_record, summary_of, write_json


def test_recorded_runs_have_the_figures_that_were_recorded():
    completed = [run for run in load_runs([REFERENCE]) if run.status == "completed"]
    assert len(completed) >= 5
    for run in completed:
        recorded = json.loads((run.folder / "summary.json").read_text())
        assert run.output_tokens_per_s == recorded["output_tokens_per_s"]["median"] > 0
        assert run.overrides


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


STEPS = {"mean_decode_batch": -2}
STEP = {"kind": "decode", "round_index": 1, "duration_s": 0.5}
PLAN = {"kv_bytes_per_token": 1000.0, "num_sliding_layers": 2, "num_full_layers": 2, "sliding_window": 16}
NEGATIVE = dict.fromkeys(("accuracy", "num_judged", "bandwidth_bytes_per_s", "roofline_fraction"), -2)
FOREIGN = '{"workload_hash": 3, "output_tokens_per_s": 7, "durations_s": [1], "warnings": {}}'
NO_NUMBERS = '{"workload_hash": "a", "output_tokens_per_s": {"median": NaN, "min": Infinity}}'
HUGE = summary_of([1.0, 2.0], num_requests=10**400, model={}, backend=math.nan)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", None),
        ("summary.json", '{"status": "comp'),
        ("summary.json", "\0\x7f" * 100),
        ("summary.json", FOREIGN),
        ("summary.json", NO_NUMBERS),
        ("summary.json", json.dumps(HUGE)),
        ("summary.json", json.dumps(summary_of([1.0, 2.0], **NEGATIVE))),
        ("engine.json", json.dumps({"plan": PLAN | {"num_sliding_layers": -2}})),
        ("engine.json", json.dumps({"plan": PLAN | {"kv_bytes_per_token": -2}})),
        ("requests.jsonl", lines({"round_index": 1, "num_prompt_tokens": -2, "num_tokens": 5})),
        ("status.json", ""),
        ("status.json", '{"status": 7}'),
        ("rounds.jsonl", '{"round_index": 0, "wall_s": "x"}\nnot json\n{"torn'),
        ("rounds.jsonl", "[" * 100_000 + "\n"),
        ("rounds.jsonl", lines(*(round_record(i, 1e-320) | {"num_output_tokens": 1e308} for i in range(5)))),
        ("rounds.jsonl", lines(*(round_record(i, 1.0) | {"num_output_tokens": 0} for i in range(5)))),
        ("rounds.jsonl", lines(*(round_record(i, 1.0) | {"steps": STEPS} for i in range(3)))),
        ("steps.jsonl", lines(STEP | {"num_steps": 1e300, "duration_s": 1e200})),
        ("steps.jsonl", lines(STEP | {"num_steps": -3})),
        ("environment.json", '{"cuda": [], "cpu": {"model": "x"}, "versions": [], "source": "x"}'),
        ("cell.json", '{"overrides": {"a": 1}, "command": 5}'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_folder_hides_no_other(make_run, file, content):
    whole, damaged = make_run("whole", ["compile=eager"]), make_run("damaged", ["compile=default"])
    write_json(damaged / "engine.json", {"plan": PLAN})
    (damaged / file).unlink(missing_ok=True)
    if content is not None:
        (damaged / file).write_bytes(content.replace("\x7f", "\udcff").encode(errors="surrogateescape"))
    runs = load_runs([whole, damaged])
    assert [run.folder.name for run in runs] == ["whole", "damaged"]
    assert "compile=eager" in format_table(runs)
    json.loads(format_json(runs))
    assert run_rows(runs)[0]["folder"] == str(whole)
    assert "</html>" in build_page(runs)


def test_run_whose_records_contradict_each_other_has_no_figures(make_run):
    folder = make_run("one")
    (folder / "summary.json").unlink()
    run = load_one(folder)
    assert (run.status, run.is_failure) == ("unreadable", True)
    assert "summary.json" in run.message
    (folder / "engine.json").write_text("[1]")
    assert load_one(folder).remarks == ("engine.json is torn or no JSON object",)
    folder = make_run("two", status="failed", message="no luck")
    (folder / "summary.json").write_text('{"output_tokens_per_s": {"median": 99.0}, "workload_hash": "a"}')
    (row,) = run_rows(load_runs([folder]))
    assert (row["output_tokens_per_s"], row["message"]) == (None, "no luck")


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, "running"), ({"pid": 2**22 + 1}, "killed"), ({"host": "elsewhere"}, "running")],
)
def test_run_whose_process_is_gone_counts_as_killed(make_run, changes, status):
    mine = {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}
    folder = make_run("one", status="running")
    write_json(folder / "status.json", mine | {"started_at": "2199-01-01T00:00:00+00:00"} | changes)
    run = load_one(folder)
    assert (run.status, run.is_failure) == (status, status == "killed")


# Sweeps


def test_sweep_has_all_its_cells_in_order_wherever_it_lies(make_run, tmp_path):
    for index in (0, 9, 10):
        make_run(f"sweep/{index}_x", [f"seed={index}"])
    make_run("sweep/0_x/attempts/1", status="failed")  # an earlier one, which is no run
    cells = [
        {"folder": f"/gone/away/{index}_x", "overrides": [f"seed={index}"], "command": "c"}
        for index in (0, 10, 9, 11)
    ]
    nowhere = [{"folder": name} for name in ("", "x" * 5000, "a\0b", "\ud800")]
    write_json(tmp_path / "sweep/sweep.json", {"name": "night", "cells": [*cells, "foreign", *nowhere]})
    *runs, damage = load_runs([tmp_path / "sweep"])
    assert (damage.folder, damage.status) == (tmp_path / "sweep", "unreadable")
    assert [run.overrides for run in runs] == [("seed=0",), ("seed=10",), ("seed=9",), ("seed=11",)]
    assert (runs[0].status, runs[-1].status) == ("completed", "not_started")
    assert (runs[-1].command, runs[-1].is_failure) == ("c", False)


@pytest.mark.parametrize("content", ['{"name": "night", "cel', '{"cells": 3}'])
def test_torn_sweep_file_is_shown_beside_the_cells_that_are_there(make_run, tmp_path, content):
    make_run("sweep/0_x", ["seed=0"])
    (tmp_path / "sweep/sweep.json").write_text(content)
    damage, cell = load_runs([tmp_path / "sweep"])
    assert (damage.status, cell.status) == ("unreadable", "completed")
    assert damage.message.startswith("sweep.json: it is torn or names no cells")


# Folders


@pytest.fixture
def refuse(monkeypatch):
    """Makes a function of the file system fail as if there were no permission, for any user."""

    def fail(path):
        raise PermissionError(errno.EACCES, "no permission", path)

    return lambda name: monkeypatch.setattr(name, fail)


def test_cell_that_may_not_be_read_is_not_taken_for_one_to_come(make_run, tmp_path, refuse):
    make_run("sweep/0_x", ["seed=0"])
    write_json(tmp_path / "sweep/sweep.json", {"cells": [{"folder": "0_x"}]})
    refuse("cbexp.report.json_files.Path.is_file")
    run = load_runs([tmp_path / "sweep"])[-1]
    assert run.status == "unreadable"
    assert "status.json cannot be read: no permission" in run.remarks


def test_folder_that_may_not_be_listed_is_refused(tmp_path, refuse):
    refuse("os.scandir")
    with pytest.raises(ReportError, match="cannot be read: no permission"):
        load_runs([tmp_path])


def test_links_are_followed_and_every_run_counts_once(make_run, tmp_path):
    """Also in loops, up, and to nothing; a sweep keeps the order of its cells."""
    near, far = make_run("outputs/near", ["seed=1"]), make_run("scratch/deep/far", ["seed=2"])
    make_run("above", ["seed=3"])
    for index in (4, 5):
        make_run(f"scratch/sweep/{index}_x", [f"seed={index}"])
    write_json(tmp_path / "scratch/sweep/sweep.json", {"cells": [{"folder": "5_x"}, {"folder": "4_x"}]})
    write_json(tmp_path / "outputs/notes/data.json", {})
    outputs = tmp_path / "outputs"
    links = {outputs / "linked": far.parent, far / "back": near, near / "there": far, near / "also": far}
    links |= {
        near / "up": tmp_path,
        near / "broken": tmp_path / "gone",
        outputs / "a": tmp_path / "scratch/sweep",
    }
    for place, target in (links | {outputs / "b": tmp_path / "scratch/sweep"}).items():
        place.symlink_to(target, target_is_directory=True)
    runs = load_runs([outputs, near, outputs])
    assert [run.overrides for run in runs] == [("seed=5",), ("seed=4",), ("seed=2",), ("seed=1",)]
    assert runs[2].folder == outputs / "linked/far"


def test_overrides_of_runs_without_cell_json_come_from_hydra(make_run):
    folder = make_run("one")
    (folder / "cell.json").unlink()
    (folder / ".hydra").mkdir()
    (folder / ".hydra/overrides.yaml").write_text("- model=tiny\n- 'name=it''s: \"x\"'\n")
    run = load_one(folder)
    assert run.overrides == ("model=tiny", 'name=it\'s: "x"')
    assert run.command == """python -m cbexp model=tiny 'name=it'"'"'s: "x"'"""
