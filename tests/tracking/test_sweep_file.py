"""scripts/wandb_sweep.yaml: what wandb's own agent makes of it, composed by cbexp's command line."""

from __future__ import annotations

from types import SimpleNamespace

import yaml
from wandb import wandb_agent

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import ExperimentConfig, TrackingConfig, register_schema
from cbexp.tracking import OBJECTIVE
from tests.tracking.wandb_fixtures import REPOSITORY

SWEEP = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())
VALUES = {name: parameter["values"] for name, parameter in SWEEP["parameters"].items()}


def commands_of_an_agent(monkeypatch, choices: list[dict]) -> list[list[str]]:
    """The commands that wandb's own agent starts for these choices."""
    started: list[list[str]] = []

    def start(command: list[str], **_options: object) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(last_sigterm_time=None)

    monkeypatch.setattr(wandb_agent, "AgentProcess", start)
    worker = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep7")
    worker._sweep_command = SWEEP["command"]
    for chosen in choices:
        arguments = {name: {"value": value} for name, value in chosen.items()}
        worker._command_run({"run_id": "agentrun", "program": SWEEP["program"], "args": arguments})
    return started


def compose(command: list[str]) -> ExperimentConfig:
    """What cbexp makes of a command that an agent starts."""
    assert command[:4] == ["/usr/bin/env", "python", "-m", "cbexp"]
    checked = check_command(parse_arguments(command[4:]), conf_dir())
    assert not checked.is_multirun
    (job,) = checked.jobs
    return job.config


def test_what_an_agent_tries_composes_to_just_that(tmp_path, monkeypatch):
    """The search is for the objective under a memory limit; as few choices as have each value of each parameter."""
    assert (SWEEP["method"], SWEEP["metric"]) == ("bayes", {"name": OBJECTIVE, "goal": "maximize"})
    # wandb adds them to a run's configuration by these names: a group's name would take the place of the group.
    assert all("." in name for name in VALUES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("RUN_ID", "SWEEP_ID", "SWEEP_PARAM_PATH"):
        monkeypatch.setenv(f"WANDB_{name}", "")  # the agent sets them
    register_schema()
    register_job_folder()
    num_choices = max(map(len, VALUES.values()))
    choices = [{name: values[i % len(values)] for name, values in VALUES.items()} for i in range(num_choices)]
    for chosen, command in zip(choices, commands_of_an_agent(monkeypatch, choices), strict=True):
        config = compose(command)
        for name, value in chosen.items():
            group, field = name.split(".")
            assert getattr(getattr(config, group), field) == value
        assert (config.name, config.model.init) == ("rollout_256", "random")
        tracking = config.tracking
        assert (tracking.mode, tracking.project) == ("online", TrackingConfig().project)
        assert tracking.max_memory_gib == 40
