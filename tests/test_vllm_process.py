"""The worker's process: its interpreter, its end, and that nothing of it outlives the run that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import DriverConfig, register_schema
from cbexp.drivers.vllm.process import WorkerProcess
from cbexp.drivers.vllm.python import check_interpreter, find_python
from cbexp.errors import ConfigError
from tests.sweep.conftest import is_running, wait_until

START_IN_A_THREAD = """
import sys, threading
from pathlib import Path
from cbexp.drivers.vllm.process import WorkerProcess

workers = []
command = (["sleep", "600"], {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1]))
thread = threading.Thread(target=lambda: workers.append(WorkerProcess(*command)))
thread.start()
thread.join()
print(workers[0]._guard.pid, workers[0]._process.pid, flush=True)
sys.stdin.read()
"""


def ignores(pid, number):
    """Whether a process ignores a signal; Linux alone tells."""
    ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return bool(int(ignored, 16) >> (number - 1) & 1)


def test_a_worker_outlives_its_thread_and_a_request_to_end_all_but_not_its_run(tmp_path):
    command = [sys.executable, "-c", START_IN_A_THREAD, str(tmp_path / "vllm.log")]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    guard, worker = map(int, run.stdout.readline().split())
    wait_until(lambda: ignores(guard, signal.SIGTERM), deadline_s=10)
    os.kill(guard, signal.SIGTERM)
    time.sleep(1.2)  # the guard looks for its parent once a second
    assert is_running(guard)
    assert is_running(worker)
    run.kill()
    run.communicate()
    wait_until(lambda: not is_running(guard) and not is_running(worker), deadline_s=10)


def test_what_a_worker_has_started_ends_with_it_although_it_went_first(tmp_path):
    path = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {path}"]
    worker = WorkerProcess(command, {"PATH": os.environ["PATH"]}, tmp_path / "vllm.log")
    wait_until(lambda: path.exists() and path.read_text())
    worker.kill()
    worker.kill()
    wait_until(lambda: not is_running(int(path.read_text())), deadline_s=10)


def test_a_worker_that_cannot_be_started_names_the_program_and_leaves_no_guard(tmp_path):
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match=r"driver.python=.*/none cannot be started: No such file"):
        WorkerProcess([str(tmp_path / "none")], {}, tmp_path / "vllm.log")
    assert set(psutil.Process().children()) == before


def test_a_sweep_is_refused_for_the_cell_that_lacks_its_packages(tmp_path):
    register_schema()
    register_job_folder()
    settings = ["experiment=smoke", "driver=vllm", f"driver.pythonpath={tmp_path},/nowhere"]
    with pytest.raises(
        ConfigError, match=r"job 1 of 2 .*driver.pythonpath=/nowhere: there is no /nowhere\.$"
    ):
        check_command(parse_arguments(["-m", *settings]), conf_dir())


def test_an_interpreter_is_a_program_and_its_link_is_not_followed(tmp_path):
    no_program = str(tmp_path)
    check_interpreter(DriverConfig(name="sync", python=no_program))
    with pytest.raises(ConfigError, match=f"^driver.python={no_program} is no program"):
        check_interpreter(DriverConfig(name="vllm", python=no_program))
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_python(DriverConfig(name="vllm", python=str(link))) == str(link)
    assert find_python(DriverConfig(name="vllm")) == sys.executable
