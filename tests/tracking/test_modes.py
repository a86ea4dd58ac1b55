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
from tests.tracking.wandb_fixtures import KEY, a_round, read_back, run_script, start

ONLINE = TrackingConfig(mode="online")
NO_CREDENTIALS = (
    r"tracking=online, but there are no credentials for https://\S+: run `wandb login`.*tracking=offline"
)


@pytest.fixture
def describe_start(run_dir, monkeypatch):
    """Starts a run under variables of wandb, and returns what its tracker says of itself."""

    def describe(mode: str, **variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        with start(run_dir, mode=mode) as tracker:
            return tracker.description

    return describe


@pytest.mark.parametrize(
    ("variables", "description", "refusal"),
    [
        ({}, r"W&B offline \(there are no credentials for https://", NO_CREDENTIALS),
        (
            {"API_KEY": "short"},
            r"W&B offline \(the credentials cannot be used \(WANDB_API_KEY invalid:",
            "tracking=online, but the credentials cannot be used",
        ),
        (
            {"API_KEY": KEY, "MODE": "dryrun"},
            r"W&B offline \(wandb's own mode",
            r"tracking=online, but wandb's own mode is dryrun \(WANDB_MODE\)",
        ),
        (
            {"API_KEY": KEY, "MODE": "disabled"},
            r"W&B disabled \(wandb's own mode",
            r"tracking=online, but wandb's own mode is disabled \(WANDB_MODE\)",
        ),
    ],
)
def test_auto_says_why_it_is_not_online_where_online_is_refused(
    run_dir, describe_start, variables, description, refusal
):
    assert re.match(description, describe_start("auto", **variables))
    assert (run_dir / "wandb").exists() == (variables.get("MODE") != "disabled")
    with pytest.raises(ConfigError, match=refusal):
        start(run_dir, mode="online")


@pytest.mark.parametrize("host", ["api.wandb.ai", "wandb.example"])
def test_credentials_of_a_netrc_file_count_for_their_host(run_dir, tmp_path, monkeypatch, host):
    def fail(**_options: object) -> None:
        raise OSError("planted")

    (tmp_path / "HOME" / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    monkeypatch.setattr(wandb, "init", fail)
    tracker = start(run_dir, mode="auto")
    tried = [re.match(r"W&B could not start (\w+): planted", warning)[1] for warning in tracker.warnings]
    assert tried == (["online", "offline"] if host == "api.wandb.ai" else ["offline"])
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
    assert re.search(NO_CREDENTIALS, capsys.readouterr().err)
    assert not (tmp_path / "outputs").exists()


def test_one_job_that_is_to_go_online_is_enough_and_cells_elsewhere_may_have_credentials_there(monkeypatch):
    others = [TrackingConfig(mode=mode) for mode in ("auto", "offline", "disabled")]
    refuse_impossible_online(others, is_local=True)
    refuse_impossible_online([ONLINE], is_local=False)
    for configs, is_local in (
        ([*others, ONLINE], True),
        ([TrackingConfig(mode="online", per_cell=False)], False),
    ):
        with pytest.raises(ConfigError, match=NO_CREDENTIALS):
            refuse_impossible_online(configs, is_local=is_local)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    refuse_impossible_online([ONLINE], is_local=True)
    assert "WANDB_SERVICE" not in os.environ  # cells find no process of wandb


def test_process_of_wandb_that_was_there_before_stays():
    wandb.setup(wandb.Settings(silent=True))
    service = os.environ["WANDB_SERVICE"]
    with pytest.raises(ConfigError, match=NO_CREDENTIALS):
        refuse_impossible_online([ONLINE], is_local=True)
    assert os.environ["WANDB_SERVICE"] == service


# wandb's own variables


@pytest.mark.parametrize("tags", [[], ["ours"]])
def test_variables_of_wandb_hold_where_nothing_is_configured_and_are_named_elsewhere(
    run_dir, monkeypatch, tags
):
    variables = {"PROJECT": "theirs", "ENTITY": "team", "TAGS": "night,h200", "RUN_GROUP": "group"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    tracker = start(run_dir, tags=tags)
    tracker.finish(0)
    project = TrackingConfig().project
    idle = [f"WANDB_PROJECT=theirs has no effect: tracking.project={project} goes before it."]
    idle += ["WANDB_TAGS=night,h200 has no effect: tracking.tags=ours goes before it."] if tags else []
    assert tracker.warnings == idle
    run = read_back(run_dir).run
    assert (run.project, run.entity, run.run_group) == (project, "team", "group")
    assert list(run.tags) == (tags or ["night", "h200"])


def test_wandb_is_imported_where_it_is_needed_alone_and_torch_never():
    script = """
        import sys
        from pathlib import Path
        from cbexp.config import TrackingConfig
        from cbexp.tracking import refuse_impossible_online, start_tracking
        with start_tracking(TrackingConfig(mode="disabled"), "name", None, {}, Path("nowhere")) as tracker:
            tracker.log_summary({"decode_tps": 1.0, "peak_reserved_gib": 1.0})
            tracker.log_completions([])
        assert (tracker.description, tracker.warnings) == ("W&B disabled", [])
        refuse_impossible_online([TrackingConfig(mode="auto")], is_local=True)
        assert not {"wandb", "torch", "transformers"} & set(sys.modules)
        assert not Path("nowhere").exists()
    """
    run_script(script)
