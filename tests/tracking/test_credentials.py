"""A sweep that cannot go online as it is told to is refused before its first cell, with no process of wandb left."""

from __future__ import annotations

import os

import pytest
import wandb

from cbexp.cli.command_line import conf_dir, main
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import TrackingConfig, register_schema
from cbexp.errors import ConfigError
from cbexp.tracking import refuse_impossible_online
from tests.tracking.test_tracking import run_script
from tests.tracking.wandb_fixtures import KEY

ONLINE = TrackingConfig(mode="online")
NO_CREDENTIALS = r"tracking=online, but there are no credentials for https://\S+: run `wandb login`"


def check(*arguments: str) -> None:
    register_schema()
    register_job_folder()
    check_command(parse_arguments(list(arguments)), conf_dir())


@pytest.mark.parametrize("per_cell", ["true", "false"])
@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_sweep_that_cannot_go_online_ends_before_its_first_cell(
    tmp_path, monkeypatch, capsys, per_cell, dry_run
):
    monkeypatch.chdir(tmp_path)
    settings = ["tracking=online", f"tracking.per_cell={per_cell}", f"dry_run={dry_run}"]
    with pytest.raises(SystemExit) as end:
        main(["-m", "experiment=smoke", "seed=1,2", *settings])
    assert end.value.code == 2
    assert "tracking=online, but there are no credentials for https://" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("mode", ["auto", "offline", "disabled"])
def test_other_modes_need_no_credentials(mode):
    check("-m", "seed=1,2", f"tracking={mode}")


def test_one_job_that_is_to_go_online_is_enough():
    with pytest.raises(ConfigError, match=NO_CREDENTIALS):
        refuse_impossible_online([TrackingConfig(mode="offline"), ONLINE], is_local=True)


def test_cells_that_run_elsewhere_may_have_credentials_there():
    refuse_impossible_online([ONLINE], is_local=False)
    with pytest.raises(ConfigError, match=NO_CREDENTIALS):
        refuse_impossible_online([TrackingConfig(mode="online", per_cell=False)], is_local=False)


def test_wandbs_own_mode_is_heard(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match="wandb's own mode is offline"):
        refuse_impossible_online([ONLINE], is_local=True)


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


def test_wandb_is_imported_for_what_is_to_go_online_alone_and_torch_never():
    script = """
        import os, sys
        from cbexp.config import TrackingConfig
        from cbexp.tracking import refuse_impossible_online
        refuse_impossible_online([TrackingConfig(mode="auto")], is_local=True)
        assert "wandb" not in sys.modules
        os.environ["WANDB_API_KEY"] = "k" * 40
        refuse_impossible_online([TrackingConfig(mode="online")], is_local=True)
        assert "torch" not in sys.modules
    """
    run_script(script)
