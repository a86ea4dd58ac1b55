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
from tests.tracking.wandb_fixtures import KEY, read_back, run_script, start

ONLINE = TrackingConfig(mode="online")
NO_CREDENTIALS = (
    r"tracking=online, but there are no credentials for https://\S+: run `wandb login`.*tracking=offline"
)


def describe_start(run_dir, mode: str) -> str:
    tracker = start(run_dir, mode=mode)
    tracker.finish(0)
    return tracker.description


def test_auto_without_credentials_is_offline_and_says_why(run_dir):
    assert "W&B offline (there are no credentials for https://" in describe_start(run_dir, "auto")


@pytest.mark.parametrize(
    ("variable", "mode"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")]
)
def test_auto_follows_the_mode_set_for_wandb_and_online_against_it_is_refused(
    run_dir, monkeypatch, variable, mode
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", variable)
    assert describe_start(run_dir, "auto").startswith(f"W&B {mode} (wandb's own mode")
    assert (run_dir / "wandb").exists() == (mode == "offline")
    with pytest.raises(
        ConfigError, match=rf"tracking=online, but wandb's own mode is {variable} \(WANDB_MODE\)"
    ):
        start(run_dir, mode="online")


@pytest.mark.parametrize("host", ["api.wandb.ai", "wandb.example"])
def test_credentials_of_a_netrc_file_count_for_their_host(run_dir, tmp_path, monkeypatch, host):
    def fail(**_options: object) -> None:
        raise OSError("planted")

    (tmp_path / "HOME" / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    monkeypatch.setattr(wandb, "init", fail)
    tracker = start(run_dir, mode="auto")
    tried = [re.match(r"W&B could not start (\w+):", warning)[1] for warning in tracker.warnings]
    assert tried == (["online", "offline"] if host == "api.wandb.ai" else ["offline"])


def test_key_of_the_wrong_shape_means_offline_and_says_so(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    description = describe_start(run_dir, "auto")
    assert "W&B offline (the credentials cannot be used (WANDB_API_KEY invalid:" in description
    with pytest.raises(ConfigError, match="tracking=online, but the credentials cannot be used"):
        start(run_dir, mode="online")


# What is refused before anything runs


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ({"mode": "online"}, {}, NO_CREDENTIALS),
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


def test_one_job_that_is_to_go_online_is_enough_and_other_modes_need_no_credentials():
    others = [TrackingConfig(mode=mode) for mode in ("auto", "offline", "disabled")]
    refuse_impossible_online(others, is_local=True)
    with pytest.raises(ConfigError, match=NO_CREDENTIALS):
        refuse_impossible_online([*others, ONLINE], is_local=True)


def test_cells_that_run_elsewhere_may_have_credentials_there():
    refuse_impossible_online([ONLINE], is_local=False)
    with pytest.raises(ConfigError, match=NO_CREDENTIALS):
        refuse_impossible_online([TrackingConfig(mode="online", per_cell=False)], is_local=False)


def test_with_credentials_it_passes_and_cells_find_no_process_of_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    refuse_impossible_online([ONLINE], is_local=True)
    assert "WANDB_SERVICE" not in os.environ


def test_process_of_wandb_that_was_there_before_stays():
    wandb.setup(wandb.Settings(silent=True))
    service = os.environ["WANDB_SERVICE"]
    with pytest.raises(ConfigError, match=NO_CREDENTIALS):
        refuse_impossible_online([ONLINE], is_local=True)
    assert os.environ["WANDB_SERVICE"] == service


# wandb's own variables


def test_variables_of_wandb_without_effect_are_named(run_dir, monkeypatch):
    for name, value in {"PROJECT": "theirs", "ENTITY": "team", "TAGS": "night", "RUN_GROUP": "group"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    tracker = start(run_dir, tags=["ours"])
    tracker.finish(0)
    project = TrackingConfig().project
    assert tracker.warnings == [
        f"WANDB_PROJECT=theirs has no effect: tracking.project={project} goes before it.",
        "WANDB_TAGS=night has no effect: tracking.tags=ours goes before it.",
    ]
    run = read_back(run_dir).run
    assert (run.project, run.entity, list(run.tags)) == (project, "team", ["ours"])
    assert run.run_group == "group"


def test_tags_of_wandbs_variable_hold_where_none_are_configured(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_TAGS", "night,h200")
    wandb.teardown()
    start(run_dir).finish(0)
    assert list(read_back(run_dir).run.tags) == ["night", "h200"]


def test_wandb_is_imported_where_it_is_needed_alone_and_torch_never(run_dir):
    script = """
        import os, sys
        from pathlib import Path
        from cbexp.config import TrackingConfig
        from cbexp.tracking import log_sweep, refuse_impossible_online, start_tracking
        with start_tracking(TrackingConfig(mode="disabled"), "name", None, {}, Path("nowhere")) as tracker:
            tracker.log_summary({"decode_tps": 1.0, "peak_reserved_gib": 1.0})
            tracker.log_completions([])
        assert (tracker.description, tracker.warnings) == ("W&B disabled", [])
        refuse_impossible_online([TrackingConfig(mode="auto")], is_local=True)
        assert "wandb" not in sys.modules
        assert not Path("nowhere").exists()

        row = {"label": "a", "status": "completed", "output_tokens_per_s": 1.0}
        assert log_sweep(TrackingConfig(mode="offline"), "modes", Path(sys.argv[1]), [row]) == []
        os.environ["WANDB_API_KEY"] = "k" * 40
        refuse_impossible_online([TrackingConfig(mode="online")], is_local=True)
        assert not {"torch", "transformers"} & set(sys.modules)
    """
    run_script(script, run_dir)
