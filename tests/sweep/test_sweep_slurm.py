"""The same command on a cluster: submitit's jobs run the cells, through a stand-in for Slurm's commands."""

import os
import signal

import psutil
import pytest

from tests.sweep.conftest import HERE, is_running, wait_until

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


@pytest.fixture
def slurm(sweeps):
    sweeps.variables = {"PATH": f"{HERE / 'fake_slurm'}{os.pathsep}{os.environ['PATH']}"}
    return sweeps


@pytest.mark.parametrize(
    "launcher",
    ["slurm", *(pytest.param(f"submitit_{name}", marks=pytest.mark.slow) for name in ("slurm", "local"))],
)
def test_jobs_run_the_cells_and_resume_submits_what_is_missing(slurm, launcher):
    slurm.ends = {2: "fail", 3: "sigkill"}
    command = ["-m", "seed=1,2,3,4", f"hydra/launcher={launcher}"]
    done = slurm.run(*command)
    assert done.code == 1, done.err
    assert done.err == ""
    assert slurm.statuses() == {0: "completed", 1: "failed", 2: "killed", 3: "completed"}
    assert "2 of 4 cells are done" in done.out
    assert (slurm.cell_folder(1) / "log.txt").exists()
    assert (slurm.cell_folder(1) / ".hydra" / "config.yaml").exists()

    slurm.ends = {}
    done = slurm.run(*command, "resume=latest")
    assert done.code == 0, done.err
    assert sorted(slurm.seeds) == [1, 2, 2, 3, 3, 4]
    assert set(slurm.statuses().values()) == {"completed"}


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_job_that_the_cluster_ends_is_interrupted_and_resumable(slurm, sent):
    slurm.ends = {2: "hang"}
    process = slurm.start("-m", "seed=1,2", "hydra/launcher=slurm")
    cell_pid = slurm.wait_for_call(2)["pid"]
    psutil.Process(cell_pid).parent().send_signal(sent)
    assert slurm.finish(process).code == 1
    wait_until(lambda: not is_running(cell_pid))
    assert slurm.statuses() == {0: "completed", 1: "interrupted"}
    assert slurm.status(1)["message"] in (f"stopped by {sent.name}", "stopped by SIGTERM")


def test_job_that_is_killed_takes_its_cell_with_it(slurm):
    slurm.ends = {1: "hang"}
    slurm.start("-m", "seed=1,2", "hydra/launcher=slurm")
    cell_pid = slurm.wait_for_call(1)["pid"]
    psutil.Process(cell_pid).parent().kill()
    wait_until(lambda: not is_running(cell_pid))
