"""Sweeps as a user starts them, over a fake job that needs no torch and ends as a test wants."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
DEADLINE_S = 60


class Sweeps:
    """Command lines in a folder of their own; `calls` are the jobs that were run, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls.jsonl"
        self.fake_path = HERE  # None: real jobs
        self.ends = {}
        self.variables = {}
        self._processes = []

    def start(self, *arguments, command=("-m", "cbexp"), **options):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(path) for path in (self.fake_path, REPOSITORY) if path),
            "FAKE_LOG": str(self.log),
            "FAKE_ENDS": json.dumps(self.ends),
            "GIT_DIR": "/nonexistent",  # the commit must not change under a test
            **self.variables,
        }
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(
            [sys.executable, *command, *arguments], cwd=self.folder, env=environment, text=True, **options
        )
        self._processes.append(process)
        return process

    def run(self, *arguments, deadline_s=DEADLINE_S, **options):
        return self.finish(self.start(*arguments, **options), deadline_s)

    def finish(self, process, deadline_s=DEADLINE_S):
        out, err = process.communicate(timeout=deadline_s)
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    @property
    def calls(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def seeds(self):
        return [call["seed"] for call in self.calls]

    @property
    def sweep_folder(self):
        (manifest,) = self.folder.glob("outputs/*/*/sweep.json")
        return manifest.parent

    def manifest(self):
        return json.loads((self.sweep_folder / "sweep.json").read_text())

    def cell_folder(self, index):
        (folder,) = [path for path in self.sweep_folder.iterdir() if path.name.startswith(f"{index}_")]
        return folder

    def status(self, index):
        return json.loads((self.cell_folder(index) / "status.json").read_text())

    def statuses(self):
        return {
            cell["index"]: self.status(cell["index"])["status"]
            for cell in self.manifest()["cells"]
            if (self.sweep_folder / cell["folder"] / "status.json").exists()
        }

    def wait_for_call(self, seed):
        """Wait until the cell of that seed has come to its behaviour, and return the call."""
        wait_until(lambda: seed in self.seeds)
        wait_until(lambda: list(self.folder.glob(f"outputs/*/*/*seed={seed}*/status.json")))
        return next(call for call in reversed(self.calls) if call["seed"] == seed)

    def close(self):
        for process in self._processes:
            process.kill()
            process.communicate()
        for call in self.calls:
            if psutil.pid_exists(call["pid"]) and is_running(call["pid"]):
                os.kill(call["pid"], signal.SIGKILL)


def wait_until(condition, deadline_s=DEADLINE_S):
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to it"
        time.sleep(0.02)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def sweeps(tmp_path):
    folder = tmp_path / "launch"
    folder.mkdir()
    sweeps = Sweeps(folder)
    yield sweeps
    sweeps.close()
