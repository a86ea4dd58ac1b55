"""No process of vLLM's outlives the run that started it, whatever the run and vLLM are at when the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbexp.peers.vllm_process import WorkerProcess
from tests.sweep.conftest import is_running, wait_until
from tests.vllm_fixtures import FakeVllm, build, experiment, read_pids, wait_until_gone, write_hanging_python

START_IN_A_THREAD = """
import sys, threading
from pathlib import Path
from cbexp.peers.vllm_process import WorkerProcess

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
        wait_until(has_started, 20)
    finally:
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)


def test_a_worker_that_holds_the_interpreter_ends_with_its_run(fake):
    fake.misbehave("hold_interpreter")
    driver, _, _ = build(experiment(fake), fake)
    kill_run(driver, lambda: fake.notes("holding"))
    wait_until_gone(fake.notes("holding") + fake.notes("engine_core"))


def test_a_worker_that_never_comes_to_run_python_ends_with_its_run(fake):
    wrapper, pids = write_hanging_python(fake.tmp_path)
    driver, _, _ = build(experiment(fake, driver={"python": str(wrapper)}), fake)
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


def test_a_program_that_cannot_be_started_leaves_no_guard(tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Exception, match="cannot be started"):
        WorkerProcess([str(tmp_path / "none")], {}, tmp_path / "vllm.log")
    (guard,) = started
    assert guard.returncode == -signal.SIGKILL
