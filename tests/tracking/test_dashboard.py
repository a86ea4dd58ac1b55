"""The dashboard: every name in it is one that a real run logs, and it is saved as it was built."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
import wandb

from cbexp.config import DatasetConfig, ExperimentConfig, SamplingConfig, TrackingConfig
from cbexp.experiment import run_experiment
from tests.tracking.wandb_fixtures import REPOSITORY, ReadBack, clean_machine, read_back

pytest.importorskip("wandb_workspaces", reason="the dashboard needs the extra: pip install '.[dashboard]'")
wr = pytest.importorskip("wandb_workspaces.reports.v2")

SCRIPT = REPOSITORY / "scripts" / "wandb_dashboard.py"
CONFIG_GROUPS = {"model", "adapter", "dataset", "sampling", "cache", "compile", "driver"}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wandb_dashboard", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dashboard = load_script()
WORKSPACE = dashboard.build_workspace("team", "project", "view")
PANELS = {section.name: section.panels for section in WORKSPACE.sections}


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> ReadBack:
    """What a run of the embedded model logs."""
    config = ExperimentConfig(
        dataset=DatasetConfig(num_prompts=4, verifier="arithmetic"),
        sampling=SamplingConfig(max_new_tokens=24),
        tracking=TrackingConfig(mode="offline"),
        num_rounds=2,
    )
    with clean_machine(tmp_path_factory.mktemp("machine")):
        outcome = run_experiment(config, tmp_path_factory.mktemp("outputs") / "run", ["num_rounds=2"])
        assert outcome.status == "completed", outcome.message
        return read_back(outcome.run_dir)


def panels_of(kind: type) -> list:
    return [panel for panels in PANELS.values() for panel in panels if isinstance(panel, kind)]


def paths_of(tree: object, prefix: str = "") -> set[str]:
    """Every key of a nested record, as W&B names it: `decode_step_s.p50`."""
    if not isinstance(tree, dict):
        return set()
    inner = [paths_of(value, f"{prefix}{key}.") for key, value in tree.items()]
    return {f"{prefix}{key}" for key in tree}.union(*inner)


def list_summary_names() -> set[str]:
    bars = {name for panel in panels_of(wr.BarPlot) for name in panel.metrics}
    axes = {axis.name for panel in panels_of(wr.ScatterPlot) for axis in (panel.x, panel.y)}
    importance = {panel.with_respect_to for panel in panels_of(wr.ParameterImportancePlot)}
    return bars | axes | importance | names_of_columns(wr.SummaryMetric)


def names_of_columns(kind: type) -> set[str]:
    columns = [column for panel in panels_of(wr.ParallelCoordinatesPlot) for column in panel.columns]
    return {column.metric.name for column in columns if isinstance(column.metric, kind)}


def list_config_names() -> set[str]:
    groups = {panel.groupby.name for panel in panels_of(wr.BarPlot) if panel.groupby is not None}
    return groups | names_of_columns(wr.Config)


def test_every_summary_metric_is_in_the_summary_of_a_run(logged):
    names = list_summary_names()
    assert len(names) > 12
    assert names <= paths_of(logged.summary)


def test_every_line_is_in_the_history_of_a_run(logged):
    rows = [row for row in logged.history if "wall_s" in row]
    names = {name for panel in panels_of(wr.LinePlot) for name in [panel.x, *panel.y]}
    assert len(names) >= 6
    assert all(names <= set(row) for row in rows)
    assert WORKSPACE.settings.x_axis in names


def test_every_histogram_is_in_the_history_of_a_run(logged):
    names = {key for panel in panels_of(wr.MediaBrowser) for key in panel.media_keys}
    (row, _) = [row for row in logged.history if "wall_s" in row]
    assert names
    assert {row[f"{name}/_type"] for name in names} == {"histogram"}


def test_every_setting_is_in_the_configuration_of_a_run(logged):
    assert list_config_names() <= paths_of(logged.config)
    assert logged.config["resolved"]["compile_mode"] != "auto"


def test_parallel_coordinates_run_over_every_configuration_group():
    assert {name.split(".")[0] for name in dashboard.CHOICES} == CONFIG_GROUPS | {"resolved"}
    assert names_of_columns(wr.Config) == set(dashboard.CHOICES)


def test_no_kind_of_panel_escapes_the_checks_above():
    checked = (wr.BarPlot, wr.LinePlot, wr.ScatterPlot, wr.MediaBrowser)
    checked += (wr.ParallelCoordinatesPlot, wr.ParameterImportancePlot)
    assert all(isinstance(panel, checked) for panels in PANELS.values() for panel in panels)


def test_view_is_saved_as_it_was_built(server, capsys):
    server.answers["mutation UpsertView"] = save_view
    dashboard.main(["--entity", "team", "--project", "mine", "--name", "Ours"])
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "mine", "Ours")
    spec = json.loads(view["spec"])
    titles = [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]]
    assert titles == list(PANELS)
    assert f"{server.url}/team/mine?nw=" in capsys.readouterr().err


def save_view(server, variables: dict) -> dict:
    server.views.append(variables)
    return {"upsertView": {"view": {"id": "id", "name": variables["name"]}, "inserted": True}}


def test_no_credentials_are_a_message(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    with pytest.raises(SystemExit, match="the view could not be saved to team/cbexp: "):
        dashboard.main(["--entity", "team"])


def test_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[dashboard\]'"):
        load_script()
