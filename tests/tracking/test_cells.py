"""Cells of sweeps and jobs of agents: whose run they are, what a resumed one continues, a sweep as one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb
import yaml

from cbexp.config import SweepInfo, TrackingConfig
from cbexp.errors import ConfigError
from cbexp.report.loading import load_runs
from cbexp.report.rows import run_rows
from cbexp.tracking import log_sweep, start_tracking
from cbexp.tracking.identity import find_cell_run_id
from tests.tracking.test_tracking import REPOSITORY, run_script
from tests.tracking.wandb_fixtures import DEAD_SERVER, KEY, a_round, a_summary, read_back

CELL = SweepInfo("group", 2, 0)


@pytest.fixture
def sweep_folder(tmp_path) -> Path:
    folder = tmp_path / "2026-01-02_03-04-05-678901"
    folder.mkdir()
    record = {"format": 1, "name": "modes", "created_at": "2026-01-02T03:04:05+00:00", "cells": []}
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def make_cell(sweep_folder: Path, index: int, name: str | None = None) -> Path:
    folder = sweep_folder / (name or f"{index}_seed={index}")
    folder.mkdir()
    (folder / "cell.json").write_text(json.dumps({"index": index, "cell_hash": f"hash{index}"}))
    return folder


def lose_server(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", DEAD_SERVER)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    wandb.teardown()


def start_cell(folder: Path, sweep: SweepInfo | None = CELL, **options: object):
    return start_tracking(TrackingConfig(mode="offline", **options), "seed=1", sweep, {"seed": 1}, folder)


def id_of(folder: Path, sweep: SweepInfo | None = CELL) -> str:
    start_cell(folder, sweep).finish(0)
    return read_back(folder).run.run_id


def test_cells_have_runs_of_their_own_in_the_group_of_their_sweep(sweep_folder, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    wandb.teardown()
    folders = [make_cell(sweep_folder, index) for index in range(2)]
    for folder in folders:
        start_cell(folder).finish(0)
    runs = [read_back(folder).run for folder in folders]
    assert len({run.run_id for run in runs} | {"shared"}) == 3
    assert [run.run_group for run in runs] == ["group", "group"]
    assert read_back(folders[0]).run.resume


def test_cell_of_a_resumed_sweep_continues_its_run(sweep_folder):
    first = make_cell(sweep_folder, 1)
    before = id_of(first)
    first.rename(sweep_folder / "moved-away")
    assert id_of(make_cell(sweep_folder, 1)) == before


def test_cell_in_a_nested_folder_is_known_again(sweep_folder):
    ids = []
    for attempt in ("a", "b"):
        (sweep_folder / attempt).mkdir()
        ids.append(id_of(make_cell(sweep_folder, 1, f"{attempt}/seed=1")))
    assert ids[0] == ids[1]


def test_same_cell_of_another_sweep_is_another_run(sweep_folder, tmp_path):
    before = id_of(make_cell(sweep_folder, 1))
    other = tmp_path / "2026-01-02_03-04-05-999999"
    other.mkdir()
    (other / "sweep.json").write_text((sweep_folder / "sweep.json").read_text())
    assert id_of(make_cell(other, 1)) != before


def test_cell_without_records_of_its_sweep_is_a_new_run_each_time(tmp_path):
    ids = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        ids.add(id_of(tmp_path / name))
    assert len(ids) == 2


@pytest.mark.parametrize("torn", ["cell.json", "../sweep.json"])
def test_cell_whose_records_are_torn_is_a_new_run(sweep_folder, torn):
    cell = make_cell(sweep_folder, 0)
    assert find_cell_run_id(cell) is not None
    (cell / torn).write_text('{"index": 0, "na')
    assert find_cell_run_id(cell) is None


def test_sweep_whose_record_is_torn_is_logged_all_the_same(sweep_folder):
    (sweep_folder / "sweep.json").write_text('{"na')
    assert log_sweep(TrackingConfig(mode="offline"), "night", sweep_folder, []) == []


def test_cell_whose_server_cannot_be_reached_is_kept_offline_as_the_run_it_is(sweep_folder, monkeypatch):
    folder = make_cell(sweep_folder, 0)
    lose_server(monkeypatch)
    with start_tracking(TrackingConfig(mode="online"), "seed=1", CELL, {"seed": 1}, folder) as tracker:
        tracker.log_round(a_round(0), [])
    (warning,) = tracker.warnings
    assert warning.startswith("W&B could not start online")
    assert read_back(folder).run.run_id == find_cell_run_id(folder)


def test_cells_of_one_process_that_cannot_go_online_print_nothing(sweep_folder, monkeypatch, capfd):
    lose_server(monkeypatch)
    for index in range(2):
        folder = make_cell(sweep_folder, index)
        with start_tracking(TrackingConfig(mode="online"), "seed=1", CELL, {"seed": 1}, folder):
            pass
    assert capfd.readouterr() == ("", "")


def test_run_of_the_callers_own_outlives_a_cell_that_cannot_go_online(sweep_folder, tmp_path, monkeypatch):
    lose_server(monkeypatch)
    (tmp_path / "own").mkdir()
    settings = wandb.Settings(silent=True, reinit="create_new")
    own = wandb.init(mode="offline", dir=tmp_path / "own", settings=settings)
    folder = make_cell(sweep_folder, 0)
    with start_tracking(TrackingConfig(mode="online"), "seed=1", CELL, {"seed": 1}, folder):
        pass
    own.log({"x": 1})
    own.finish()
    assert [row["x"] for row in read_back(tmp_path / "own").history] == [1]


def test_configured_group_goes_before_that_of_the_sweep(sweep_folder):
    folder = make_cell(sweep_folder, 0)
    start_cell(folder, group="mine").finish(0)
    assert read_back(folder).run.run_group == "mine"


# Agents


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The environment in which `wandb agent` starts a job with compile.mode=eager."""
    parameters = tmp_path / "config-agentrun.yaml"
    parameters.write_text(yaml.safe_dump({"wandb_version": 1, "compile.mode": {"value": "eager"}}))
    for name, value in {
        "WANDB_SWEEP_ID": "sweep7",
        "WANDB_RUN_ID": "agentrun",
        "WANDB_PROJECT": "of-the-sweep",
        "WANDB_ENTITY": "team-of-the-sweep",
        "WANDB_SWEEP_PARAM_PATH": str(parameters),
    }.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()


@pytest.mark.usefixtures("agent")
def test_job_of_an_agent_joins_its_run(run_dir):
    config = {"compile": {"mode": "eager", "region": "model"}}
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
    tables = sorted(
        (json.loads(path.read_text()) for path in paths), key=lambda table: -len(table["columns"])
    )
    cells, bars = tables
    return cells, bars


def test_cells_do_not_track_when_the_sweep_does(sweep_folder, tmp_path):
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
    assert read_back(run_dir).exit_code == 0


@pytest.mark.parametrize(
    ("statuses", "exit_code"),
    [(("completed", "completed", "not_applicable"), 0), (("completed", "killed", "completed"), 1)],
)
def test_sweep_is_one_run_with_a_table(sweep_folder, statuses, exit_code):
    config = TrackingConfig(mode="offline", per_cell=False, tags=["t"])
    assert log_sweep(config, "modes", sweep_folder, rows_of(*statuses)) == []
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
    config = TrackingConfig(mode="offline", per_cell=False)
    for _ in range(2):
        assert log_sweep(config, "modes", sweep_folder, rows_of("completed")) == []
    files = list(sweep_folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1


def log_online(sweep_folder: Path, **options: object) -> list[str]:
    return log_sweep(TrackingConfig(mode="online", **options), "modes", sweep_folder, rows_of("completed"))


def test_sweep_that_has_lost_its_credentials_is_kept_offline(sweep_folder):
    (warning,) = log_online(sweep_folder)
    assert warning.startswith("tracking=online, but there are no credentials")
    assert f"; the data is kept: wandb sync {sweep_folder}/wandb/offline-run-" in warning
    assert read_back(sweep_folder).summary["num_cells"] == 1


@pytest.mark.parametrize("mode", ["online", "auto"])
def test_sweep_whose_server_cannot_be_reached_is_kept_offline(sweep_folder, monkeypatch, mode):
    lose_server(monkeypatch)
    (warning,) = log_sweep(TrackingConfig(mode=mode), "modes", sweep_folder, rows_of("completed"))
    assert warning.startswith("W&B could not start online")
    assert f"; the data is kept: wandb sync {sweep_folder}/wandb/offline-run-" in warning
    assert read_back(sweep_folder).summary["num_cells"] == 1


def test_sweep_that_wandb_takes_neither_way_costs_a_warning(sweep_folder):
    (warning,) = log_online(sweep_folder, project="a/b")
    assert "project" in warning
    assert not (sweep_folder / "wandb").exists()


@pytest.mark.parametrize(
    "rows", [[], [{"label": "a", "status": "failed", "output_tokens_per_s": None, "x": {}}]]
)
def test_sweep_without_figures_is_logged_all_the_same(sweep_folder, rows):
    assert log_sweep(TrackingConfig(mode="offline"), "night", sweep_folder, rows) == []
    assert read_back(sweep_folder).summary["num_cells"] == len(rows)


def test_table_that_wandb_does_not_take_costs_a_warning(sweep_folder):
    odd = [{"label": "a", "status": "failed", "output_tokens_per_s": None, "x": {1, 2}}]
    (warning,) = log_sweep(TrackingConfig(mode="offline"), "night", sweep_folder, odd)
    assert warning.startswith("W&B: logging values failed (TypeError")
    assert read_back(sweep_folder).exit_code == 1


def test_disabled_sweep_logs_nothing(sweep_folder):
    assert log_sweep(TrackingConfig(mode="disabled"), "modes", sweep_folder, []) == []
    assert not (sweep_folder / "wandb").exists()


def test_rows_of_the_report_can_be_logged(tmp_path):
    reference = REPOSITORY / "outputs" / "reference"
    rows = run_rows(load_runs([reference]))
    assert rows
    assert log_sweep(TrackingConfig(mode="offline"), "reference", tmp_path, rows) == []
    _, bars = tables_of(tmp_path)
    figures = [[row["label"], row["output_tokens_per_s"]] for row in rows]
    assert bars["data"] == [figure for figure in figures if figure[1] is not None]


def test_a_sweep_is_logged_without_loading_torch(sweep_folder):
    script = """
        import sys
        from pathlib import Path
        from cbexp.config import TrackingConfig
        from cbexp.tracking import log_sweep
        row = {"label": "a", "status": "completed", "output_tokens_per_s": 1.0}
        assert log_sweep(TrackingConfig(mode="offline"), "modes", Path(sys.argv[1]), [row]) == []
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    run_script(script, sweep_folder)
