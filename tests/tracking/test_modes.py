"""Online, offline or not at all: what decides it, and what is refused before anything runs."""

from __future__ import annotations

import os
import re

import pytest
import wandb

from cbexp.cli.command_line import main
from cbexp.config import TrackingConfig
from cbexp.errors import ConfigError
from cbexp.tracking import refuse_impossible_online
from tests.tracking.conftest import KEY, a_round, read_back, start

ONLINE = TrackingConfig(mode="online")
NO_CREDENTIALS = "there are no credentials for https://"


@pytest.mark.parametrize(
    ("variables", "mode", "reason"),
    [
        ({}, "offline", NO_CREDENTIALS),
        ({"API_KEY": "short"}, "offline", "the credentials cannot be used"),
        ({"API_KEY": KEY, "MODE": "dryrun"}, "offline", "wandb's own mode is dryrun"),
        ({"API_KEY": KEY, "MODE": "disabled"}, "disabled", "wandb's own mode is disabled"),
    ],
)
def test_auto_says_why_it_is_not_online_and_online_is_refused(run_dir, monkeypatch, variables, mode, reason):
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with start(run_dir, mode="auto") as tracker:
        assert tracker.description.startswith(f"W&B {mode} ({reason}")
    assert (run_dir / "wandb").exists() == (mode == "offline")
    with pytest.raises(ConfigError, match=f"tracking=online, but {reason}"):
        start(run_dir, mode="online")


def test_job_goes_on_where_wandb_cannot_start(run_dir, tmp_path, monkeypatch):
    """With the credentials of a netrc file."""

    def fail(**_options: object) -> None:
        raise OSError("planted")

    (tmp_path / "HOME" / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    monkeypatch.setattr(wandb, "init", fail)
    tracker = start(run_dir, mode="auto")
    assert tracker.warnings == [f"W&B could not start {mode}: planted" for mode in ("online", "offline")]
    assert tracker.description == "W&B off"
    tracker.log_round(a_round(0), [])  # is no error


# What is refused before anything runs


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ({"project": "a/b"}, {}, "project name 'a/b'"),
        ({"tags": [""]}, {}, "run_tags: .*Tag at index 0 is empty"),
        ({}, {"WANDB_INIT_TIMEOUT": "soon"}, "init_timeout"),
    ],
)
def test_what_wandb_would_refuse_is_a_clear_error(run_dir, monkeypatch, options, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()
    with pytest.raises(ConfigError, match=message):
        start(run_dir, **options)
    assert list(run_dir.iterdir()) == []


def test_sweep_that_cannot_go_online_ends_before_its_first_cell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["-m", "experiment=smoke", "seed=1,2", "tracking=online"])
    assert end.value.code == 2
    advice = r"run `wandb login`, set WANDB_API_KEY, or use tracking=offline"
    assert re.search(f"{NO_CREDENTIALS}.*{advice}", capsys.readouterr().err)
    assert not (tmp_path / "outputs").exists()


def test_one_job_that_is_to_go_online_is_enough_and_cells_elsewhere_may_have_credentials_there(monkeypatch):
    others = [TrackingConfig(mode=mode) for mode in ("auto", "offline", "disabled")]
    refuse_impossible_online(others, is_local=True)
    refuse_impossible_online([ONLINE], is_local=False)
    refused = [([*others, ONLINE], True), ([TrackingConfig(mode="online", per_cell=False)], False)]
    for configs, is_local in refused:
        with pytest.raises(ConfigError, match=NO_CREDENTIALS):
            refuse_impossible_online(configs, is_local=is_local)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    refuse_impossible_online([ONLINE], is_local=True)
    assert "WANDB_SERVICE" not in os.environ  # cells find no process of wandb


# wandb's own variables


def test_variables_of_wandb_hold_where_nothing_is_configured_and_are_named_else(run_dir, monkeypatch):
    variables = {"PROJECT": "theirs", "ENTITY": "team", "TAGS": "night,h200", "RUN_GROUP": "group"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    tracker = start(run_dir, project="mine")
    tracker.finish(0)
    (idle,) = tracker.warnings
    assert idle == "WANDB_PROJECT=theirs has no effect: tracking.project=mine goes before it."
    run = read_back(run_dir).run
    assert (run.project, run.entity, run.run_group) == ("mine", "team", "group")
    assert list(run.tags) == ["night", "h200"]
