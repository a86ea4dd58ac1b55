"""scripts/wandb_sweep.yaml: what wandb's own agent makes of it, composed and run by cbexp's command line."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from wandb import wandb_agent

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import ExperimentConfig, TrackingConfig, register_schema
from cbexp.tracking import OBJECTIVE
from tests.tracking.wandb_fixtures import REPOSITORY, read_back

SWEEP = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())
VALUES = {name: parameter["values"] for name, parameter in SWEEP["parameters"].items()}


def each_value() -> list[dict]:
    """As few choices as have each value of each parameter."""
    most = max(map(len, VALUES.values()))
    return [{name: values[i % len(values)] for name, values in VALUES.items()} for i in range(most)]


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Hands wandb's own agent a job; returns the command and the environment that it starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, str(tmp_path) if name == "WANDB_DIR" else "")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep7")
    started = []
    process = SimpleNamespace(last_sigterm_time=None)
    monkeypatch.setattr(wandb_agent, "AgentProcess", lambda **options: started.append(options) or process)
    worker = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep7")
    worker._sweep_command = SWEEP["command"]

    def start(chosen: dict) -> tuple[list[str], dict]:
        arguments = {name: {"value": value} for name, value in chosen.items()}
        worker._command_run({"run_id": "agentrun", "program": SWEEP["program"], "args": arguments})
        return started[-1]["command"], started[-1]["env"]

    return start


def compose(command: list[str]) -> ExperimentConfig:
    """What cbexp makes of a command that an agent starts."""
    assert command[:4] == ["/usr/bin/env", "python", "-m", "cbexp"]
    register_schema()
    register_job_folder()
    checked = check_command(parse_arguments(command[4:]), conf_dir())
    assert not checked.is_multirun
    (job,) = checked.jobs
    return job.config


@pytest.mark.parametrize("chosen", each_value(), ids=lambda chosen: ",".join(map(str, chosen.values())))
def test_what_an_agent_tries_composes_to_just_that(agent, chosen):
    command, _ = agent(chosen)
    config = compose(command)
    for name, value in chosen.items():
        group, field = name.split(".")
        assert getattr(getattr(config, group), field) == value
    assert (config.name, config.model.init) == ("rollout_256", "random")


def test_search_is_for_the_objective_under_a_memory_limit(agent):
    assert SWEEP["method"] == "bayes"
    # wandb adds them to a run's configuration by these names: a group's name would take the place of the group.
    assert all("." in name for name in VALUES)
    assert SWEEP["metric"] == {"name": OBJECTIVE, "goal": "maximize"}
    tracking = compose(agent(each_value()[0])[0]).tracking
    assert tracking.max_memory_gib == 40
    assert (tracking.mode, tracking.project) == ("online", TrackingConfig().project)


@pytest.mark.slow
def test_what_does_not_fit_is_worth_nothing(agent, tmp_path):
    """It ends before anything runs, as the agent's run."""
    command, environment = agent({"compile.mode": "eager", "compile.fusion": "none"})
    small = ("experiment=smoke", "model=tiny", "hydra.run.dir=run", "tracking=offline")
    small += ("cache.num_tokens=100000000000",)
    replaced = {word.split("=")[0] for word in small} | {"model.init", "num_rounds"}
    words = [word for word in command[3:] if word.split("=")[0] not in replaced] + [*small]
    environment = {name: value for name, value in environment.items() if value}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 1, done.stderr
    found = read_back(tmp_path / "run")
    assert (found.run.run_id, found.run.sweep_id, found.exit_code) == ("agentrun", "sweep7", 1)
    assert [row["objective"] for row in found.history if "objective" in row] == [0.0]
    assert found.summary["objective"] == 0.0
    assert found.config["compile.mode"] == found.config["compile"]["mode"] == "eager"
