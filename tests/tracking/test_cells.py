"""Cells of sweeps and jobs of agents: whose run they are, what a resumed one continues, a sweep as one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb
import yaml

from cbexp.config import SweepInfo, TrackingConfig
from cbexp.errors import ConfigError
from cbexp.report import load_runs, run_rows
from cbexp.tracking import log_sweep, start_tracking
from cbexp.tracking.identity import find_cell_run_id
from tests.tracking.wandb_fixtures import (
    REPOSITORY,
    a_round,
    a_summary,
    lose_server,
    make_cell,
    make_sweep,
    read_back,
)

CELL = SweepInfo("group", 2, 0)


@pytest.fixture
def sweep_folder(tmp_path) -> Path:
    return make_sweep(tmp_path / "2026-01-02_03-04-05-678901")


def start_cell(folder: Path, sweep: SweepInfo | None = CELL, mode: str = "offline", **options: object):
    return start_tracking(TrackingConfig(mode=mode, **options), "seed=1", sweep, {"seed": 1}, folder)


def test_cells_have_runs_of_their_own_in_the_group_of_their_sweep(sweep_folder, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    wandb.teardown()
    folders = [make_cell(sweep_folder, index) for index in range(2)]
    for folder, group in zip(folders, (None, "mine"), strict=True):
        start_cell(folder, group=group).finish(0)
    runs = [read_back(folder).run for folder in folders]
    assert [run.run_id for run in runs] == [find_cell_run_id(folder) for folder in folders]
    assert len({run.run_id for run in runs} | {"shared"}) == 3
    assert [run.run_group for run in runs] == ["group", "mine"]
    assert runs[0].resume


def test_run_id_is_that_of_the_cell_in_its_sweep_wherever_it_lies(sweep_folder, tmp_path):
    before = find_cell_run_id(make_cell(sweep_folder, 1))
    assert find_cell_run_id(make_cell(sweep_folder, 1, "attempt/nested")) == before
    assert find_cell_run_id(make_cell(sweep_folder, 2)) != before
    assert find_cell_run_id(make_cell(make_sweep(tmp_path / "other"), 1)) != before
    other = make_cell(sweep_folder, 1, "other")
    (other / "cell.json").write_text('{"index": 1, "cell_hash": "other"}')
    assert find_cell_run_id(other) != before


@pytest.mark.parametrize("torn", ["cell.json", "../sweep.json"])
def test_cell_whose_records_are_torn_is_a_new_run(sweep_folder, torn):
    cell = make_cell(sweep_folder, 0)
    (cell / torn).write_text('{"index": 0, "na')
    assert find_cell_run_id(cell) is None
    start_cell(cell).finish(0)
    assert read_back(cell).run.run_id


def test_cells_whose_server_cannot_be_reached_are_kept_offline_in_silence(sweep_folder, monkeypatch, capfd):
    lose_server(monkeypatch)
    for index in range(2):
        folder = make_cell(sweep_folder, index)
        with start_cell(folder, mode="online") as tracker:
            tracker.log_round(a_round(0), [])
    assert capfd.readouterr() == ("", "")
    assert "W&B offline (online failed); upload with: wandb sync" in tracker.description
    (warning,) = tracker.warnings
    assert warning.startswith("W&B could not start online: ")
    assert f"; the data is kept: wandb sync {folder}/wandb/offline-run-" in warning
    found = read_back(folder)
    assert found.run.run_id == find_cell_run_id(folder)
    assert [row["round"] for row in found.history] == [0]


def test_run_of_the_callers_own_outlives_a_cell_that_cannot_go_online(sweep_folder, tmp_path, monkeypatch):
    lose_server(monkeypatch)
    settings = wandb.Settings(silent=True, reinit="create_new")
    own = wandb.init(mode="offline", dir=tmp_path, settings=settings)
    start_cell(make_cell(sweep_folder, 0), mode="online").finish(0)
    own.log({"x": 1})
    own.finish()
    assert [row["x"] for row in read_back(tmp_path).history] == [1]


# Agents


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The environment in which `wandb agent` starts a job with compile.mode=eager."""
    parameters = tmp_path / "config-agentrun.yaml"
    parameters.write_text(yaml.safe_dump({"wandb_version": 1, "compile.mode": {"value": "eager"}}))
    variables = {"SWEEP_ID": "sweep7", "RUN_ID": "agentrun", "SWEEP_PARAM_PATH": str(parameters)}
    for name, value in {**variables, "PROJECT": "of-the-sweep", "ENTITY": "team-of-the-sweep"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()


@pytest.mark.usefixtures("agent")
def test_job_of_an_agent_joins_its_run(run_dir):
    config = {"compile": {"mode": "eager", "fusion": "auto"}}
    settings = TrackingConfig(mode="offline", project="cbexp", entity="me")
    with start_tracking(settings, "compile.mode=eager", None, config, run_dir) as tracker:
        tracker.log_summary(a_summary())
    assert tracker.warnings == []
    found = read_back(run_dir)
    assert (found.run.run_id, found.run.sweep_id) == ("agentrun", "sweep7")
    assert (found.run.project, found.run.entity) == ("of-the-sweep", "team-of-the-sweep")
    assert found.config == config | {"compile.mode": "eager"}
    assert found.summary["objective"] == 100.0


@pytest.mark.usefixtures("agent")
def test_multirun_of_an_agent_is_refused(sweep_folder):
    with pytest.raises(ConfigError, match="a W&B agent runs one configuration at a time"):
        start_cell(make_cell(sweep_folder, 0))


# One run for the sweep


def rows_of(*statuses: str) -> list[dict]:
    return [
        {
            "label": f"seed={index}",
            "status": status,
            "output_tokens_per_s": 10.0 * index if status == "completed" else None,
            "accuracy": None,
            "extra": [index],
            "mixed": index if index else "none",
            "are_rounds_identical": status == "completed",
        }
        for index, status in enumerate(statuses)
    ]


def tables_of(folder: Path) -> tuple[dict, dict]:
    """The table of all cells and the one that the bars are drawn from."""
    paths = folder.glob("wandb/offline-run-*/files/media/table/*.json")
    tables = [json.loads(path.read_text()) for path in paths]
    cells, bars = sorted(tables, key=lambda table: -len(table["columns"]))
    return cells, bars


def log(sweep_folder: Path, rows: list[dict], mode: str = "offline", **options: object) -> list[str]:
    return log_sweep(TrackingConfig(mode=mode, per_cell=False, **options), "modes", sweep_folder, rows)


def test_cells_do_not_track_when_the_sweep_does(sweep_folder):
    folder = make_cell(sweep_folder, 0)
    with start_cell(folder, per_cell=False) as tracker:
        tracker.log_round(a_round(0), [])
    assert tracker.description == "W&B: one run for the whole sweep, at its end"
    assert tracker.warnings == []
    assert not (folder / "wandb").exists()


def test_single_run_says_that_per_cell_has_no_effect(run_dir):
    tracker = start_cell(run_dir, sweep=None, per_cell=False)
    tracker.finish(0)
    assert tracker.warnings == ["tracking.per_cell=false has no effect on a single run: remove it."]


@pytest.mark.parametrize(
    ("statuses", "exit_code"),
    [(("completed", "completed", "not_applicable"), 0), (("completed", "killed", "completed"), 1)],
)
def test_sweep_is_one_run_with_a_table(sweep_folder, statuses, exit_code):
    assert log(sweep_folder, rows_of(*statuses), tags=["t"]) == []
    found = read_back(sweep_folder)
    assert (found.run.display_name, found.run.run_group, list(found.run.tags)) == ("modes", "modes", ["t"])
    assert found.exit_code == exit_code
    assert found.summary["num_cells"] == 3
    assert found.summary["statuses"] == {status: statuses.count(status) for status in statuses}
    cells, bars = tables_of(sweep_folder)
    row = dict(zip(cells["columns"], cells["data"][0], strict=True))
    assert row == rows_of("completed")[0] | {"extra": "[0]", "mixed": "none"}
    assert bars["columns"] == ["label", "output_tokens_per_s"]
    assert len(bars["data"]) == statuses.count("completed")


def test_resumed_sweep_continues_its_run(sweep_folder):
    for _ in range(2):
        assert log(sweep_folder, rows_of("completed")) == []
    files = list(sweep_folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1


@pytest.mark.parametrize("has_credentials", [False, True])
def test_sweep_that_cannot_go_online_is_kept_offline(sweep_folder, monkeypatch, has_credentials):
    if has_credentials:
        lose_server(monkeypatch)
    (warning,) = log(sweep_folder, rows_of("completed"), mode="online")
    why = "W&B could not start online" if has_credentials else "tracking=online, but there are no credentials"
    assert warning.startswith(why)
    assert f"; the data is kept: wandb sync {sweep_folder}/wandb/offline-run-" in warning
    assert read_back(sweep_folder).summary["num_cells"] == 1


FAILED_ROW = {"label": "a", "status": "failed", "output_tokens_per_s": None, "x": {}}


def test_sweep_without_figures_is_logged_all_the_same(sweep_folder):
    (sweep_folder / "sweep.json").write_text('{"na')  # nor does a torn record stop it
    assert log(sweep_folder, [FAILED_ROW]) == []
    assert read_back(sweep_folder).summary["num_cells"] == 1


@pytest.mark.parametrize(
    ("row", "options", "warning"),
    [
        (FAILED_ROW, {"mode": "online", "project": "a/b"}, "project"),
        (FAILED_ROW | {"x": {1, 2}}, {}, "W&B: logging values failed (TypeError"),
    ],
)
def test_what_wandb_does_not_take_costs_a_warning(sweep_folder, row, options, warning):
    (found,) = log(sweep_folder, [row], **options)
    assert warning in found


def test_disabled_sweep_logs_nothing(sweep_folder):
    assert log(sweep_folder, [], mode="disabled") == []
    assert not (sweep_folder / "wandb").exists()


def test_rows_of_the_report_can_be_logged(tmp_path):
    rows = run_rows(load_runs([REPOSITORY / "outputs" / "reference"]))
    assert rows
    assert log(tmp_path, rows) == []
    figures = [[row["label"], row["output_tokens_per_s"]] for row in rows]
    assert tables_of(tmp_path)[1]["data"] == [figure for figure in figures if figure[1] is not None]
