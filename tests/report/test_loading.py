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
from cbexp.report.page import build_page
from cbexp.report.table import format_json
from tests.report.report_fixtures import REFERENCE, load_one, round_record, summary_of, write_json


def test_completed_run_has_its_figures(make_run):
    run = load_one(make_run("one", ["model=tiny", "compile=eager"]))
    assert run.status == "completed"
    assert run.output_tokens_per_s == pytest.approx(100 / 1.2)
    assert [timed.wall_s for timed in run.rounds] == [1.0, 1.1, 1.2, 1.3, 1.4]
    assert run.warmup_rounds_s == 2.0
    assert run.command == "python -m cbexp model=tiny compile=eager"


def test_recorded_runs_have_the_figures_that_were_recorded():
    completed = [run for run in load_runs([REFERENCE]) if run.status == "completed"]
    assert len(completed) >= 5
    for run in completed:
        recorded = json.loads((run.folder / "summary.json").read_text())
        assert run.output_tokens_per_s == recorded["output_tokens_per_s"]["median"] > 0
        assert run.overrides


def test_errors_of_the_self_check_are_read_from_records_of_any_age(make_run):
    """Older summaries have none of logits."""
    errors = {"mean_logprob_error": 0.03, "max_logprob_error": 0.2}
    logit_errors = {"mean_logit_error": 0.04, "max_logit_error": 0.25}
    folders = [make_run("old", ["seed=1"], **errors), make_run("new", ["seed=2"], **errors, **logit_errors)]
    rows = {Path(row["folder"]).name: row for row in run_rows(load_runs(folders))}
    for name, expected in {"old": errors | dict.fromkeys(logit_errors), "new": errors | logit_errors}.items():
        assert {key: rows[name][key] for key in expected} == expected


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", None),
        ("summary.json", '{"status": "comp'),
        ("summary.json", "[1, 2]"),
        ("summary.json", "\0\x7f" * 100),
        (
            "summary.json",
            '{"workload_hash": 3, "output_tokens_per_s": 7, "durations_s": [1], "warnings": {}}',
        ),
        ("summary.json", '{"workload_hash": "a", "output_tokens_per_s": {"median": NaN, "min": Infinity}}'),
        (
            "summary.json",
            json.dumps(summary_of([1.0, 2.0], num_requests=10**400, model={}, backend=math.nan)),
        ),
        ("status.json", ""),
        ("status.json", '{"status": 7}'),
        ("rounds.jsonl", '{"round_index": 0, "wall_s": "x"}\nnot json\n{"torn'),
        ("rounds.jsonl", "[" * 100_000 + "\n"),
        ("rounds.jsonl", lines(*(round_record(index, 1e-320, num_tokens=1e308) for index in range(5)))),
        ("rounds.jsonl", lines(*(round_record(index, 1.0, num_tokens=0) for index in range(5)))),
        ("steps.jsonl", lines({"kind": "decode", "round_index": 1, "num_steps": 1e300, "duration_s": 1e200})),
        ("steps.jsonl", lines({"kind": "decode", "round_index": 1, "num_steps": -3, "duration_s": 0.5})),
        ("environment.json", "null"),
        ("environment.json", '{"cuda": [], "cpu": 3, "versions": [], "source": "x"}'),
        ("environment.json", '{"cpu": {"model": "x"}}'),
        ("cell.json", '{"overrides": {"a": 1}, "command": 5}'),
        ("all but rounds.jsonl", None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_folder_hides_no_other(make_run, file, content):
    whole, damaged = make_run("whole", ["compile=eager"]), make_run("damaged", ["compile=default"])
    for name in [name for name in os.listdir(damaged) if name != "rounds.jsonl"] if "all" in file else [file]:
        (damaged / name).unlink(missing_ok=True)
        if content is not None:
            (damaged / name).write_bytes(content.replace("\x7f", "\udcff").encode(errors="surrogateescape"))
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
    assert (run.status, run.is_failure) == ("unreadable", True)
    assert "summary.json" in run.message


def test_figures_of_a_run_that_did_not_complete_do_not_count(make_run):
    folder = make_run("one", status="failed", message="no luck")
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


def test_sweep_has_all_its_cells_in_order_also_those_without_a_folder(make_run, tmp_path):
    for index in (0, 9, 10):
        make_run(f"sweep/{index}_x", [f"seed={index}"])
    make_run("sweep/0_x/attempts/1", status="failed")  # an earlier one, which is no run
    cells = [
        {"folder": f"{index}_x", "overrides": [f"seed={index}"], "command": "c"} for index in (0, 9, 10, 11)
    ]
    write_json(tmp_path / "sweep/sweep.json", {"name": "night", "cells": [*cells, "foreign", {"x": 1}]})
    *runs, damage = load_runs([tmp_path / "sweep"])
    assert (damage.folder, damage.status) == (tmp_path / "sweep", "unreadable")
    assert [run.overrides for run in runs] == [("seed=0",), ("seed=9",), ("seed=10",), ("seed=11",)]
    assert (runs[-1].status, runs[-1].command, runs[-1].is_failure) == ("not_started", "c", False)


def test_moved_sweep_is_read_where_it_lies(make_run, tmp_path):
    make_run("moved/0_x", ["seed=0"])
    cells = [{"folder": "/gone/away/0_x", "overrides": ["seed=0"], "command": "c"}]
    write_json(tmp_path / "moved/sweep.json", {"cells": cells})
    assert load_one(tmp_path / "moved").status == "completed"


@pytest.mark.parametrize("content", ['{"name": "night", "cel', '{"cells": 3}', "[]"])
def test_torn_sweep_file_is_shown_beside_the_cells_that_are_there(make_run, tmp_path, content):
    make_run("sweep/0_x", ["seed=0"])
    (tmp_path / "sweep/sweep.json").write_text(content)
    damage, cell = load_runs([tmp_path / "sweep"])
    assert (damage.status, cell.status) == ("unreadable", "completed")
    assert damage.message.startswith("sweep.json: it is torn or names no cells")


@pytest.mark.parametrize("folder", ["", "x" * 5000, "a\0b", "\ud800"])
def test_cell_whose_folder_can_be_nowhere_hides_no_other(make_run, tmp_path, folder):
    make_run("sweep/0_x", ["seed=0"])
    write_json(tmp_path / "sweep/sweep.json", {"cells": [{"folder": folder}, {"folder": "0_x"}]})
    assert [run.status for run in load_runs([tmp_path / "sweep"])] == ["unreadable", "completed"]


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


def test_folder_given_twice_counts_once_and_foreign_folders_not_at_all(make_run, tmp_path):
    folder = make_run("one")
    write_json(tmp_path / "notes/data.json", {})
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
    write_json(tmp_path / "scratch/sweep/sweep.json", {"cells": [{"folder": "1_x"}, {"folder": "0_x"}]})
    (tmp_path / "outputs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "outputs" / name).symlink_to(tmp_path / "scratch/sweep", target_is_directory=True)
    assert [run.overrides for run in load_runs([tmp_path / "outputs"])] == [("seed=1",), ("seed=0",)]


def test_links_in_a_loop_and_links_that_lead_up_end(make_run, tmp_path):
    one, other = make_run("outputs/one", ["seed=1"]), make_run("scratch/other", ["seed=2"])
    make_run("above", ["seed=3"])
    (one / "there").symlink_to(other, target_is_directory=True)
    (other / "back").symlink_to(one, target_is_directory=True)
    (one / "up").symlink_to(tmp_path, target_is_directory=True)
    (one / "broken").symlink_to(tmp_path / "gone")
    runs = load_runs([tmp_path / "outputs"])
    assert sorted(run.overrides for run in runs) == [("seed=1",), ("seed=2",)]


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
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)
