"""The worker's process: its interpreter, its end, and that nothing of it outlives the run that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import DriverConfig, register_schema
from cbexp.drivers.vllm.process import WorkerEndedError, WorkerProcess
from cbexp.drivers.vllm.python import check_interpreter, find_python
from cbexp.engine.types import EngineError
from cbexp.errors import ConfigError
from tests.sweep.conftest import is_running, wait_until
from tests.vllm_fixtures import FakeVllm, build, experiment, read_pids, wait_until_gone, write_hanging_python

START_IN_A_THREAD = """
import sys, threading
from pathlib import Path
from cbexp.drivers.vllm.process import WorkerProcess

def start():
    worker = WorkerProcess(["sleep", "600"], {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1]))
    print(worker._guard.pid, worker._process.pid, flush=True)
    workers.append(worker)

workers = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return FakeVllm(monkeypatch, tmp_path)


def ignores(pid, number):
    """Whether a process ignores a signal; Linux alone tells."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ignored,) = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
    return bool(int(ignored, 16) >> (number - 1) & 1)


def kill_run(driver, has_started):
    """Start the driver in a process of its own, and kill that once `has_started`."""
    run = os.fork()
    if run == 0:
        try:
            driver.warmup()
        finally:
            os._exit(1)
    try:
        wait_until(has_started)
    finally:
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)


def test_a_worker_that_holds_the_interpreter_ends_with_its_run(fake):
    fake.misbehave("hold_interpreter")
    driver, _ = build(experiment(fake), fake)
    kill_run(driver, lambda: fake.notes("holding"))
    wait_until_gone(fake.notes("holding") + fake.notes("engine_core"))


def test_a_worker_that_never_comes_to_run_python_ends_with_its_run(fake):
    wrapper, pids = write_hanging_python(fake.tmp_path)
    driver, _ = build(experiment(fake, driver={"python": str(wrapper)}), fake)
    kill_run(driver, pids.exists)
    wait_until_gone(read_pids(pids))


def test_a_worker_outlives_the_thread_that_started_it_and_a_request_to_end_all(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", START_IN_A_THREAD, str(tmp_path / "vllm.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    guard, worker = map(int, run.stdout.readline().split())
    wait_until(lambda: ignores(guard, signal.SIGTERM))
    os.kill(guard, signal.SIGTERM)
    time.sleep(1.2)  # the guard looks for its parent once a second
    assert is_running(guard)
    assert is_running(worker)
    run.kill()
    run.communicate()
    wait_until_gone([guard, worker])


def test_what_a_worker_has_started_ends_with_it_although_it_went_first(tmp_path):
    pids = tmp_path / "pids"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pids}"]
    worker = WorkerProcess(command, {"PATH": os.environ["PATH"]}, tmp_path / "vllm.log")
    wait_until(lambda: pids.exists() and pids.read_text())
    worker.kill()
    worker.kill()
    wait_until_gone(read_pids(pids))


def test_a_program_that_cannot_be_started_is_named_and_leaves_no_guard(tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ConfigError, match=r"driver.python=.*/none cannot be started: No such file"):
        WorkerProcess([str(tmp_path / "none")], {}, tmp_path / "vllm.log")
    (guard,) = started
    assert guard.returncode == -signal.SIGKILL


def test_a_log_that_cannot_be_written_is_not_laid_to_the_interpreter(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"the worker's log .*file/vllm.log cannot be written"):
        WorkerProcess([sys.executable, "-c", ""], {}, tmp_path / "file" / "vllm.log")


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    code = f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 2})"
    worker = WorkerProcess([sys.executable, "-c", code], {}, tmp_path / "vllm.log")
    with pytest.raises(WorkerEndedError, match=f"killed by signal {signal.SIGRTMIN + 2}$"):
        worker.receive(timeout_s=120)
    worker.kill()


# The interpreter, which the command line checks before anything runs


def check(*arguments):
    register_schema()
    register_job_folder()
    return check_command(parse_arguments(list(arguments)), conf_dir())


def test_a_command_line_without_its_interpreter_is_refused():
    with pytest.raises(ConfigError, match=r"^driver.python=/nowhere/python is no program: give the path"):
        check("experiment=smoke", "driver=vllm", "driver.python=/nowhere/python")


def test_a_sweep_is_refused_for_the_cell_that_lacks_its_packages(tmp_path):
    with pytest.raises(
        ConfigError, match=r"job 1 of 2 .*driver.pythonpath=/nowhere: there is no /nowhere\.$"
    ):
        check("-m", "experiment=smoke", "driver=vllm", f"driver.pythonpath={tmp_path},/nowhere")


def test_an_interpreter_of_another_driver_is_not_looked_for():
    check_interpreter(DriverConfig(name="sync", python="/nowhere/python"))


def test_a_folder_is_no_interpreter_and_a_link_is_not_followed(tmp_path):
    with pytest.raises(ConfigError, match="is no program"):
        check_interpreter(DriverConfig(name="vllm", python=str(tmp_path)))
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_python(DriverConfig(name="vllm", python=str(link))) == str(link)
