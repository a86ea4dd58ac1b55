"""The dashboard: every name in it is one that a real run logs, and it is saved as it was built."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from cbexp.config import DatasetConfig, ExperimentConfig, SamplingConfig, TrackingConfig
from cbexp.experiment import run_experiment
from tests.tracking.wandb_fixtures import REPOSITORY, read_back

pytest.importorskip("wandb_workspaces", reason="the dashboard needs the extra: pip install '.[dashboard]'")
wr = pytest.importorskip("wandb_workspaces.reports.v2")

SCRIPT = REPOSITORY / "scripts" / "wandb_dashboard.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wandb_dashboard", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dashboard = load_script()
WORKSPACE = dashboard.build_workspace("team", "project", "view")
PANELS = {section.name: section.panels for section in WORKSPACE.sections}


def paths_of(tree: object, prefix: str = "") -> set[str]:
    """Every key of a nested record, as W&B names it: `decode_step_s.p50`."""
    if not isinstance(tree, dict):
        return set()
    inner = [paths_of(value, f"{prefix}{key}.") for key, value in tree.items()]
    return {f"{prefix}{key}" for key in tree}.union(*inner)


def names_in_panels() -> dict[str, set[str]]:
    """What the panels show, by where a run logs it; every kind of panel must be known here."""
    names: dict[str, set[str]] = {"summary": set(), "config": set(), "history": set(), "histograms": set()}
    for panel in (panel for panels in PANELS.values() for panel in panels):
        match panel:
            case wr.BarPlot():
                names["summary"].update(panel.metrics)
                names["config"].update([panel.groupby.name] if panel.groupby is not None else [])
            case wr.ScatterPlot():
                names["summary"].update([panel.x.name, panel.y.name])
            case wr.ParameterImportancePlot():
                names["summary"].add(panel.with_respect_to)
            case wr.ParallelCoordinatesPlot():
                for column in panel.columns:
                    place = "config" if isinstance(column.metric, wr.Config) else "summary"
                    names[place].add(column.metric.name)
            case wr.LinePlot():
                names["history"].update([panel.x, *panel.y])
            case wr.MediaBrowser():
                names["histograms"].update(panel.media_keys)
            case _:
                raise AssertionError(f"what does a {type(panel)} show?")
    return names


@pytest.mark.slow
def test_every_name_is_one_that_a_run_of_the_embedded_model_logs(tmp_path):
    config = ExperimentConfig(
        dataset=DatasetConfig(num_prompts=4, verifier="arithmetic"),
        sampling=SamplingConfig(max_new_tokens=24),
        tracking=TrackingConfig(mode="offline"),
        num_rounds=2,
    )
    outcome = run_experiment(config, tmp_path / "outputs" / "run", ["num_rounds=2"])
    assert outcome.status == "completed", outcome.message
    logged, names = read_back(outcome.run_dir), names_in_panels()
    assert all(names.values())
    assert names["summary"] <= paths_of(logged.summary)
    assert names["config"] <= paths_of(logged.config)
    assert logged.config["resolved"]["compile_mode"] != "auto"
    first, second = (row for row in logged.history if "wall_s" in row)
    assert names["history"] | {WORKSPACE.settings.x_axis} <= set(first) & set(second)
    assert {first[f"{name}/_type"] for name in names["histograms"]} == {"histogram"}


def test_view_is_saved_as_it_was_built(monkeypatch):
    saved = []
    monkeypatch.setattr(dashboard.ws.Workspace, "save", lambda view: saved.append(view))
    dashboard.main(["--entity", "team", "--project", "mine", "--name", "Ours"])
    (view,) = saved
    assert (view.entity, view.project, view.name) == ("team", "mine", "Ours")
    assert [section.name for section in view.sections] == list(PANELS)


def test_no_credentials_and_a_missing_package_are_messages(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(SystemExit, match="the view could not be saved to team/cbexp: "):
        dashboard.main(["--entity", "team"])
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[dashboard\]'"):
        load_script()
