"""Cells of sweeps and jobs of agents: whose run they are, what a resumed one continues, a sweep as one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb
import yaml

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import SweepInfo, TrackingConfig, register_schema
from cbexp.errors import ConfigError
from cbexp.report import load_runs, run_rows
from cbexp.tracking import OBJECTIVE, log_sweep, start_tracking
from cbexp.tracking.identity import find_cell_run_id
from tests.tracking.conftest import REPOSITORY, a_round, a_summary, lose_server, read_back

CELL = SweepInfo("group", 2, 0)


def make_sweep(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sweep.json").write_text('{"name": "modes", "created_at": "2026-01-02T03:04:05+00:00"}')
    return folder


@pytest.fixture
def sweep_folder(tmp_path) -> Path:
    return make_sweep(tmp_path / "2026-01-02_03-04-05-678901")


def make_cell(sweep_folder: Path, index: int, name: str | None = None, cell_hash: str = "hash") -> Path:
    folder = sweep_folder / (name or f"{index}_seed={index}")
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps({"index": index, "cell_hash": cell_hash}))
    return folder


def start_cell(folder: Path, sweep: SweepInfo | None = CELL, mode: str = "offline", **options: object):
    return start_tracking(TrackingConfig(mode=mode, **options), "seed=1", sweep, {"seed": 1}, folder)


def test_cells_have_runs_of_their_own_in_the_group_of_their_sweep(sweep_folder, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    wandb.teardown()
    folders = [make_cell(sweep_folder, index) for index in range(3)]
    (folders[2] / "cell.json").write_text('{"index": 0, "na')  # torn: a new run
    for folder, group in zip(folders, (None, "mine", None), strict=True):
        start_cell(folder, group=group).finish(0)
    runs = [read_back(folder).run for folder in folders]
    assert [run.run_id for run in runs[:2]] == [find_cell_run_id(folder) for folder in folders[:2]]
    assert len({run.run_id for run in runs} | {"shared"}) == 4
    assert [run.run_group for run in runs] == ["group", "mine", "group"]
    assert runs[0].resume


def test_run_id_is_that_of_the_cell_in_its_sweep_wherever_it_lies(sweep_folder, tmp_path):
    before = find_cell_run_id(make_cell(sweep_folder, 1))
    assert find_cell_run_id(make_cell(sweep_folder, 1, "attempt/nested")) == before
    others = [make_cell(sweep_folder, 2), make_cell(sweep_folder, 1, "other", cell_hash="other")]
    others.append(make_cell(make_sweep(tmp_path / "elsewhere"), 1))
    assert before not in map(find_cell_run_id, others)
    assert find_cell_run_id(make_cell(tmp_path, 1)) is None


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
    assert (found.run.run_id, found.rounds) == (find_cell_run_id(folder), [0])


def test_run_of_the_callers_own_outlives_a_cell_that_cannot_go_online(sweep_folder, tmp_path, monkeypatch):
    lose_server(monkeypatch)
    settings = wandb.Settings(silent=True, reinit="create_new")
    own = wandb.init(mode="offline", dir=tmp_path, settings=settings)
    start_cell(make_cell(sweep_folder, 0), mode="online").finish(0)
    own.log({"x": 1})
    own.finish()
    assert [row["x"] for row in read_back(tmp_path).history] == [1]


def test_job_of_an_agent_joins_its_run(run_dir, sweep_folder, monkeypatch):
    parameters = run_dir / "config-agentrun.yaml"
    parameters.write_text(yaml.safe_dump({"wandb_version": 1, "compile.mode": {"value": "eager"}}))
    variables = {"SWEEP_ID": "sweep7", "RUN_ID": "agentrun", "SWEEP_PARAM_PATH": str(parameters)}
    for name, value in {**variables, "PROJECT": "of-the-sweep", "ENTITY": "team-of-the-sweep"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
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
    with pytest.raises(ConfigError, match="a W&B agent runs one configuration at a time"):
        start_cell(make_cell(sweep_folder, 0))


def test_what_the_sweep_file_tries_composes_to_just_that():
    """The search is for the objective under a memory limit; as few choices as have each value of each setting."""
    sweep = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())
    assert (sweep["method"], sweep["metric"]) == ("bayes", {"name": OBJECTIVE, "goal": "maximize"})
    *_, module, program = sweep["command"][:4]
    assert (module, program, sweep["command"][-1]) == ("-m", "cbexp", "${args_no_hyphens}")
    values = {name: parameter["values"] for name, parameter in sweep["parameters"].items()}
    # wandb adds them to a run's configuration by these names: a group's name would take the place of the group.
    assert all("." in name for name in values)
    register_schema()
    register_job_folder()
    for i in range(max(map(len, values.values()))):
        chosen = {name: choices[i % len(choices)] for name, choices in values.items()}
        words = [*sweep["command"][4:-1], *(f"{name}={value}" for name, value in chosen.items())]
        (job,) = check_command(parse_arguments(words), conf_dir()).jobs
        for name, value in chosen.items():
            group, field = name.split(".")
            assert getattr(getattr(job.config, group), field) == value
        assert (job.config.name, job.config.model.init) == ("rollout_256", "random")
        tracking = job.config.tracking
        assert (tracking.mode, tracking.project) == ("online", TrackingConfig().project)
        assert tracking.max_memory_gib == 40


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


def test_cells_do_not_track_when_the_sweep_does(sweep_folder, run_dir):
    folder = make_cell(sweep_folder, 0)
    tracker = start_cell(folder, per_cell=False)
    assert tracker.description == "W&B: one run for the whole sweep, at its end"
    assert not (folder / "wandb").exists()
    single = start_cell(run_dir, sweep=None, per_cell=False)
    single.finish(0)
    assert single.warnings == ["tracking.per_cell=false has no effect on a single run: remove it."]


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
    """Also one without figures."""
    for status in ("failed", "completed"):
        assert log(sweep_folder, rows_of(status)) == []
    files = list(sweep_folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1


def test_what_wandb_does_not_take_costs_a_warning_and_nothing_where_it_is_disabled(sweep_folder):
    assert log(sweep_folder, [], mode="disabled") == []
    (warning,) = log(sweep_folder, rows_of("failed"), mode="online", project="a/b")
    assert "project" in warning
    assert not (sweep_folder / "wandb").exists()


def test_rows_of_the_report_can_be_logged(tmp_path):
    """Into a folder without a sweep's record."""
    rows = run_rows(load_runs([REPOSITORY / "outputs" / "reference"]))
    assert rows
    assert log(tmp_path, rows) == []
    figures = [[row["label"], row["output_tokens_per_s"]] for row in rows]
    assert tables_of(tmp_path)[1]["data"] == [figure for figure in figures if figure[1] is not None]
