"""Runs are read in whatever state their folders are, and nothing that is there is left out."""

from __future__ import annotations

import json
import os
import socket

import pytest

from cbexp.report import format_table, load_runs, run_rows
from cbexp.report.page import build_page
from cbexp.report.table import format_json
from tests.report.conftest import load_one, round_record, write_json

FOREIGN = '{"workload_hash": 3, "output_tokens_per_s": 7, "durations_s": [1], "warnings": {}}'
NO_NUMBERS = '{"workload_hash": "a", "output_tokens_per_s": {"median": NaN, "min": Infinity}}'
SILENT_ROUND = round_record(1, 1.0) | {"num_output_tokens": 0}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", '{"status": "comp'),
        ("summary.json", FOREIGN),
        ("summary.json", NO_NUMBERS),
        ("rounds.jsonl", '{"round_index": 0, "wall_s": "x"}\nnot json\n{"torn'),
        ("rounds.jsonl", f"{json.dumps(SILENT_ROUND)}\n" * 5),
        ("environment.json", '{"cuda": [], "cpu": {"model": "x"}, "versions": [], "source": "x"}'),
        ("cell.json", '{"overrides": {"a": 1}, "command": 5}'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_folder_hides_no_other(make_run, file, content):
    whole, damaged = make_run("whole", ["compile=eager"]), make_run("damaged", ["compile=default"])
    (damaged / file).write_text(content)
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


def test_run_whose_process_is_gone_counts_as_killed(make_run):
    mine = {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}
    folder = make_run("one", status="running")
    gone, far_away = {"pid": 2**22 + 1}, {"host": "elsewhere"}
    for changes, status in (({}, "running"), (gone, "killed"), (gone | far_away, "running")):
        write_json(folder / "status.json", mine | {"started_at": "2199-01-01T00:00:00+00:00"} | changes)
        run = load_one(folder)
        assert (run.status, run.is_failure) == (status, status == "killed")


# Sweeps


def test_sweep_has_all_its_cells_in_order_wherever_it_lies(make_run, tmp_path):
    for index in (0, 9, 10):
        make_run(f"sweep/{index}_x", [f"seed={index}"])
    make_run("sweep/0_x/attempts/1", status="failed")  # an earlier one, which is no run
    folders = {f"/gone/away/{index}_x": [f"seed={index}"] for index in (0, 10, 9, 11)}
    cells = [{"folder": folder, "overrides": own, "command": "c"} for folder, own in folders.items()]
    write_json(tmp_path / "sweep/sweep.json", {"name": "night", "cells": [*cells, {"folder": ""}]})
    *runs, damage = load_runs([tmp_path / "sweep"])
    assert (damage.folder, damage.status) == (tmp_path / "sweep", "unreadable")
    assert [run.overrides for run in runs] == [("seed=0",), ("seed=10",), ("seed=9",), ("seed=11",)]
    assert (runs[0].status, runs[-1].status) == ("completed", "not_started")
    assert (runs[-1].command, runs[-1].is_failure) == ("c", False)

    (tmp_path / "sweep/sweep.json").write_text('{"name": "night", "cel')
    damage, *runs = load_runs([tmp_path / "sweep"])
    assert damage.message.startswith("sweep.json: it is torn or names no cells")
    assert [run.overrides for run in runs] == [("seed=0",), ("seed=9",), ("seed=10",)]


# Folders


def test_links_are_followed_and_every_run_counts_once(make_run, tmp_path):
    outputs, near, far = (
        tmp_path / "outputs",
        make_run("outputs/near", ["seed=1"]),
        make_run("far", ["seed=2"]),
    )
    (outputs / "linked").symlink_to(far)
    make_run("above", ["seed=3"])
    (far / "up").symlink_to(tmp_path)
    runs = load_runs([outputs, near, outputs])
    assert [run.overrides for run in runs] == [("seed=2",), ("seed=1",)]
