"""Runs are read in whatever state their folders are, and nothing that is there is left out."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cbexp.report import ReportError, format_table, load_runs, run_rows
from cbexp.report.loading import load_run
from cbexp.report.page import build_page
from cbexp.report.table import format_json
from tests.report.report_fixtures import round_record, summary_of, write_json

REFERENCE = Path(__file__).parents[2] / "outputs/reference"


def load_one(folder):
    (run,) = load_runs([folder])
    return run


def test_completed_run_has_its_figures(make_run):
    run = load_one(make_run("one", ["model=tiny", "compile=eager"]))
    assert run.status == "completed"
    assert run.output_tokens_per_s == pytest.approx(100 / 1.2)
    assert [timed.wall_s for timed in run.rounds] == [1.0, 1.1, 1.2, 1.3, 1.4]
    assert run.warmup_rounds_s == 2.0
    assert run.command == "python -m cbexp model=tiny compile=eager"


def test_recorded_runs_are_found_with_what_they_were_measured_at():
    runs = load_runs([REFERENCE])
    rates = {run.folder.name: run.output_tokens_per_s for run in runs}
    completed = [run for run in runs if run.status == "completed"]
    assert len(completed) >= 5
    for run in completed:
        recorded = json.loads((run.folder / "summary.json").read_text())
        assert rates[run.folder.name] is not None
        assert run.output_tokens_per_s == recorded["output_tokens_per_s"]["median"]
        assert run.overrides


def test_errors_of_the_self_check_are_read_from_records_of_any_age(make_run):
    """Older summaries have none of logits."""
    errors = {"mean_logprob_error": 0.03, "max_logprob_error": 0.2}
    logit_errors = {"mean_logit_error": 0.04, "max_logit_error": 0.25}
    folders = [make_run("old", ["seed=1"], **errors), make_run("new", ["seed=2"], **errors, **logit_errors)]
    rows = {Path(row["folder"]).name: row for row in run_rows(load_runs(folders))}
    for name, expected in {"old": errors | dict.fromkeys(logit_errors), "new": errors | logit_errors}.items():
        assert {key: rows[name][key] for key in expected} == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "summary.json").write_text('{"status": "comp'),
        lambda folder: (folder / "summary.json").write_text("[1, 2]"),
        lambda folder: (folder / "summary.json").write_bytes(b"\x00\xff\xfe" * 100),
        lambda folder: (folder / "summary.json").unlink(),
        lambda folder: (folder / "status.json").write_text(""),
        lambda folder: (folder / "status.json").write_text('{"status": 7}'),
        lambda folder: (folder / "rounds.jsonl").write_text(
            '{"round_index": 0, "wall_s": "x"}\nnot json\n{"torn'
        ),
        lambda folder: (folder / "rounds.jsonl").write_text("[" * 100_000 + "\n"),
        lambda folder: (folder / "environment.json").write_text("null"),
        lambda folder: (folder / "environment.json").write_text(
            '{"cuda": [], "cpu": 3, "versions": [], "source": "x"}'
        ),
        lambda folder: (folder / "cell.json").write_text('{"overrides": {"a": 1}, "command": 5}'),
        lambda folder: (folder / "summary.json").write_text(
            '{"workload_hash": 3, "output_tokens_per_s": 7, "durations_s": [1], "warnings": {"a": 1}}'
        ),
        lambda folder: (folder / "summary.json").write_text(
            '{"workload_hash": "a", "output_tokens_per_s": {"median": NaN, "min": Infinity}}'
        ),
        lambda folder: (folder / "environment.json").write_text('{"cpu": {"model": "x"}}'),
        lambda folder: (folder / "summary.json").write_text(
            json.dumps(summary_of([1.0, 2.0], num_requests=10**400, model={"a": 1}, backend=math.nan))
        ),
        lambda folder: (folder / "rounds.jsonl").write_text(
            "".join(json.dumps(round_record(index, 1e-320, num_tokens=1e308)) + "\n" for index in range(5))
        ),
        lambda folder: (folder / "rounds.jsonl").write_text(
            "".join(json.dumps(round_record(index, 1.0, num_tokens=0)) + "\n" for index in range(5))
        ),
        lambda folder: (folder / "steps.jsonl").write_text(
            "".join(
                json.dumps({"kind": "decode", "round_index": 1, "num_steps": num_steps, "duration_s": 1e200})
                + "\n"
                for num_steps in (1e300, 10**12, -3, 0.5)
            )
        ),
        lambda folder: [(folder / name).unlink() for name in os.listdir(folder) if name != "rounds.jsonl"],
    ],
)
def test_damaged_folder_is_reported_and_hides_no_other(make_run, damage):
    whole, damaged = make_run("whole", ["compile=eager"]), make_run("damaged", ["compile=default"])
    damage(damaged)
    runs = load_runs([whole, damaged])
    assert [run.folder.name for run in runs] == ["whole", "damaged"]
    assert "compile=eager" in format_table(runs)
    json.loads(format_json(runs))
    assert run_rows(runs)[0]["folder"] == str(whole)
    assert "</html>" in build_page(runs)


def test_completed_without_a_summary_is_not_taken_for_completed(make_run):
    folder = make_run("one")
    (folder / "summary.json").unlink()
    run = load_one(folder)
    assert run.status == "unreadable"
    assert run.is_failure
    assert "summary.json" in run.message


def test_figures_of_a_run_that_did_not_complete_do_not_count(make_run):
    folder = make_run("one", status="failed", message="no luck")
    (folder / "summary.json").write_text('{"output_tokens_per_s": {"median": 99.0}, "workload_hash": "a"}')
    (row,) = run_rows(load_runs([folder]))
    assert row["output_tokens_per_s"] is None
    assert row["message"] == "no luck"


def test_process_that_is_gone_counts_as_killed(make_run):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = make_run("one", status="running")
    status = {
        "status": "running",
        "pid": gone.pid,
        "host": socket.gethostname(),
        "started_at": "2026-01-01T00:00:00+00:00",
    }
    (folder / "status.json").write_text(json.dumps(status))
    assert load_one(folder).status == "killed"


def test_process_that_lives_and_one_of_another_host_are_running(make_run, own_status):
    here, there = make_run("here", status="running"), make_run("there", status="running")
    (here / "status.json").write_text(json.dumps(own_status))
    assert load_one(here).status == "running"
    (there / "status.json").write_text(json.dumps(own_status | {"host": "elsewhere", "pid": 1}))
    assert load_one(there).status == "running"
    assert not load_one(there).is_failure


def test_sweep_has_all_its_cells_in_order_also_those_without_a_folder(make_run, tmp_path):
    for index in (0, 9, 10):
        make_run(f"sweep/{index}_x", [f"seed={index}"])
    cells = [
        {"folder": f"{index}_x", "overrides": [f"seed={index}"], "command": "c"} for index in (0, 9, 10, 11)
    ]
    (tmp_path / "sweep/sweep.json").write_text(
        json.dumps({"name": "night", "cells": [*cells, "foreign", {"x": 1}]})
    )
    *runs, damage = load_runs([tmp_path / "sweep"])
    assert (damage.folder, damage.status) == (tmp_path / "sweep", "unreadable")
    assert [run.overrides for run in runs] == [("seed=0",), ("seed=9",), ("seed=10",), ("seed=11",)]
    assert runs[-1].status == "not_started"
    assert runs[-1].command == "c"
    assert not runs[-1].is_failure


def test_moved_sweep_is_read_where_it_lies(make_run, tmp_path):
    make_run("moved/0_x", ["seed=0"])
    cells = [{"folder": "/gone/away/0_x", "overrides": ["seed=0"], "command": "c"}]
    (tmp_path / "moved/sweep.json").write_text(json.dumps({"cells": cells}))
    assert load_one(tmp_path / "moved").status == "completed"


@pytest.mark.parametrize("content", ['{"name": "night", "cel', '{"cells": 3}', "[]"])
def test_torn_sweep_file_is_told_beside_the_cells_that_are_there(make_run, tmp_path, content):
    make_run("sweep/0_x", ["seed=0"])
    (tmp_path / "sweep/sweep.json").write_text(content)
    damage, cell = load_runs([tmp_path / "sweep"])
    assert (damage.status, cell.status) == ("unreadable", "completed")
    assert damage.message.startswith("sweep.json: it is torn or names no cells")


@pytest.mark.parametrize("folder", ["", "x" * 5000, "a\0b", "\ud800"])
def test_cell_whose_folder_can_be_nowhere_hides_no_other(make_run, tmp_path, folder):
    make_run("sweep/0_x", ["seed=0"])
    cells = [{"folder": folder, "overrides": ["seed=7"]}, {"folder": "0_x"}]
    (tmp_path / "sweep/sweep.json").write_text(json.dumps({"cells": cells}))
    assert [run.status for run in load_runs([tmp_path / "sweep"])] == ["unreadable", "completed"]


def test_cell_that_may_not_be_read_is_not_taken_for_one_to_come(make_run, tmp_path, monkeypatch):
    make_run("sweep/0_x", ["seed=0"])
    (tmp_path / "sweep/sweep.json").write_text(json.dumps({"cells": [{"folder": "0_x"}]}))

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("cbexp.report.json_files.Path.is_file", refuse)
    monkeypatch.setattr("cbexp.report.loading.os.path.exists", lambda path: str(path).endswith("sweep"))
    run = load_run(tmp_path / "sweep/0_x")
    assert run.status == "unreadable"
    assert "status.json cannot be read: Permission denied" in run.remarks


def test_folder_that_may_not_be_listed_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ReportError, match="cannot be read: Permission denied"):
        load_runs([tmp_path])


def test_earlier_attempts_at_a_cell_are_no_runs(make_run, tmp_path):
    make_run("sweep/0_x")
    make_run("sweep/0_x/attempts/1", status="failed")
    assert load_one(tmp_path / "sweep").status == "completed"


def test_folder_given_twice_counts_once_and_foreign_folders_not_at_all(make_run, tmp_path):
    folder = make_run("one")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/data.json").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [run.folder for run in load_runs([folder, tmp_path, folder])] == [folder]


def test_run_that_is_moved_elsewhere_and_linked_back_is_there(make_run, tmp_path):
    make_run("outputs/near", ["seed=1"])
    make_run("scratch/deep/far", ["seed=2"])
    (tmp_path / "outputs/linked").symlink_to(tmp_path / "scratch/deep", target_is_directory=True)
    runs = load_runs([tmp_path / "outputs"])
    assert [run.overrides for run in runs] == [("seed=2",), ("seed=1",)]
    assert runs[0].folder == tmp_path / "outputs/linked/far"


def test_linked_sweep_counts_once_with_its_cells_in_order(make_run, tmp_path):
    for index in (0, 1):
        make_run(f"scratch/sweep/{index}_x", [f"seed={index}"])
    cells = [{"folder": f"{index}_x", "overrides": [f"seed={index}"]} for index in (1, 0)]
    write_json(tmp_path / "scratch/sweep/sweep.json", {"cells": cells})
    (tmp_path / "outputs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "outputs" / name).symlink_to(tmp_path / "scratch/sweep", target_is_directory=True)
    runs = load_runs([tmp_path / "outputs"])
    assert [run.overrides for run in runs] == [("seed=1",), ("seed=0",)]


def test_links_in_a_loop_and_links_that_lead_up_end(make_run, tmp_path):
    one, other = make_run("outputs/one", ["seed=1"]), make_run("scratch/other", ["seed=2"])
    make_run("above", ["seed=3"])
    (one / "there").symlink_to(other, target_is_directory=True)
    (other / "back").symlink_to(one, target_is_directory=True)
    (one / "up").symlink_to(tmp_path, target_is_directory=True)
    (one / "broken").symlink_to(tmp_path / "gone")
    runs = load_runs([tmp_path / "outputs"])
    assert sorted(run.overrides for run in runs) == [("seed=1",), ("seed=2",)]


def test_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ReportError, match="is not there"):
        load_runs([tmp_path / "none"])


def test_overrides_of_runs_without_cell_json_come_from_hydra(make_run):
    folder = make_run("one")
    (folder / "cell.json").unlink()
    (folder / ".hydra").mkdir()
    (folder / ".hydra/overrides.yaml").write_text("- model=tiny\n- 'name=it''s: \"x\"'\n")
    run = load_one(folder)
    assert run.overrides == ("model=tiny", 'name=it\'s: "x"')
    assert run.command == """python -m cbexp model=tiny 'name=it'"'"'s: "x"'"""


def test_the_package_loads_no_torch_and_no_configuration_library():
    script = (
        "import sys, cbexp.report, cbexp.report.command_line\n"
        "heavy = {'torch', 'transformers', 'hydra', 'omegaconf', 'wandb', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
