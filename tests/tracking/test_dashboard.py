"""The dashboard: every name in it is one that a real run logs."""

from __future__ import annotations

import runpy
import sys

import pytest

from cbexp.config import DatasetConfig, ExperimentConfig, SamplingConfig, TrackingConfig
from cbexp.experiment import run_experiment
from tests.tracking.conftest import REPOSITORY, read_back

pytest.importorskip("wandb_workspaces", reason="the dashboard needs the extra: pip install '.[dashboard]'")

SCRIPT = REPOSITORY / "scripts" / "wandb_dashboard.py"
DASHBOARD = runpy.run_path(str(SCRIPT))
WORKSPACE = DASHBOARD["build_workspace"]("team", "project", "view")
PLACES = ("metrics", "groupby", "x", "y", "columns", "media_keys", "with_respect_to")


def paths_of(tree: object, prefix: str = "") -> set[str]:
    """Every key of a nested record, as W&B names it: `decode_step_s.p50`."""
    if not isinstance(tree, dict):
        return set()
    inner = [paths_of(value, f"{prefix}{key}.") for key, value in tree.items()]
    return {f"{prefix}{key}" for key in tree}.union(*inner)


def names_in(panel: object) -> set[str]:
    """What a panel shows, of any kind."""
    shown = [getattr(panel, place, None) or [] for place in PLACES]
    items = [item for value in shown for item in (value if isinstance(value, list) else [value])]
    metrics = [getattr(item, "metric", item) for item in items]
    return {metric if isinstance(metric, str) else metric.name for metric in metrics}


@pytest.mark.slow
def test_every_name_is_one_that_a_run_of_the_embedded_model_logs(tmp_path):
    config = ExperimentConfig(
        dataset=DatasetConfig(num_prompts=4, num_generations=2, verifier="arithmetic"),
        sampling=SamplingConfig(max_new_tokens=24),
        tracking=TrackingConfig(mode="offline"),
        num_rounds=2,
    )
    outcome = run_experiment(config, tmp_path / "outputs" / "run", ["num_rounds=2"])
    assert outcome.status == "completed", outcome.message
    logged = read_back(outcome.run_dir)
    assert logged.config["resolved"]["compile_mode"] != "auto"
    first, second = (row for row in logged.history if "wall_s" in row)
    histograms = {name.removesuffix("/_type") for name, kind in first.items() if kind == "histogram"}
    known = paths_of(logged.summary) | paths_of(logged.config) | set(first) & set(second) | histograms
    for section in WORKSPACE.sections:
        names = [names_in(panel) for panel in section.panels]
        assert all(names)
        assert set().union(*names) <= known, section.name
    assert WORKSPACE.settings.x_axis in second


def test_no_credentials_and_a_missing_package_are_messages(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(SystemExit, match="the view could not be saved to team/mine: "):
        DASHBOARD["main"](["--entity", "team", "--project", "mine"])
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[dashboard\]'"):
        runpy.run_path(str(SCRIPT))
