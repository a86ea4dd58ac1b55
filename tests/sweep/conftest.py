"""Sweeps as a user starts them, over a fake job that needs no torch and ends as a test wants."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cbexp.cli.command_line import main
from cbexp.sweep.stop_signals import STOP_SIGNALS
from tests.sweep import fake_job

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
QUIET = "tracking=disabled"
DEADLINE_S = 600  # a guard: nothing here waits for long on an idle machine


class Sweeps:
    """Command lines in a folder of their own; `calls` are the jobs that were run, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls.jsonl"
        self.fake_path = HERE  # None: real jobs
        self.ends = {}
        self.variables = {}
        self._processes = []

    def environment(self):
        # No git: the commit must not change under a test.
        fake = {"FAKE_LOG": str(self.log), "FAKE_ENDS": json.dumps(self.ends), "GIT_DIR": "/nonexistent"}
        return fake | self.variables

    def run_here(self, *arguments, tracking=QUIET):
        """Run a sweep with all its cells in this process."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            patch.setitem(sys.modules, "cbexp.experiment", fake_job)
            for name, value in self.environment().items():
                patch.setenv(name, value)
            try:
                main([*arguments, tracking, "isolation=none"])
            except SystemExit as end:
                code = end.code
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

    def start(self, *arguments, command=("-m", "cbexp"), **options):
        """Start a sweep in a process, with its cells in processes of their own."""
        path = os.pathsep.join(str(path) for path in (self.fake_path, REPOSITORY) if path)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heed_signals} | options
        process = subprocess.Popen(
            [sys.executable, *command, *arguments, QUIET],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path} | self.environment(),
            text=True,
            **options,
        )
        self._processes.append(process)
        return process

    def run(self, *arguments, **options):
        return self.finish(self.start(*arguments, **options))

    def finish(self, process):
        out, err = process.communicate(timeout=DEADLINE_S)
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

    def cell(self, index):
        return json.loads((self.cell_folder(index) / "cell.json").read_text())

    def status(self, index):
        return json.loads((self.cell_folder(index) / "status.json").read_text())

    def statuses(self):
        cells = [self.sweep_folder / cell["folder"] / "status.json" for cell in self.manifest()["cells"]]
        found = {index: path for index, path in enumerate(cells) if path.exists()}
        return {index: json.loads(path.read_text())["status"] for index, path in found.items()}

    def wait_for_call(self, seed):
        """Wait until the cell of that seed has come to its behaviour, and return the call."""
        self.wait_for(lambda: list(self.folder.glob(f"outputs/*/*/*seed={seed}*/status.json")))
        return next(call for call in reversed(self.calls) if call["seed"] == seed)

    def wait_for(self, condition):
        """Wait for what the process that was started last brings about."""
        wait_until(lambda: condition() or self._processes[-1].poll() is not None)
        assert condition(), self.finish(self._processes[-1])

    def close(self):
        for process in self._processes:
            process.kill()
            process.communicate()
        for call in self.calls:
            if call["pid"] != os.getpid() and is_running(call["pid"]):
                os.kill(call["pid"], signal.SIGKILL)


def heed_signals():
    """In a process to be: signals end it, also where a shell or nohup has the tests ignore some."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_DFL)


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
    (tmp_path / "launch").mkdir()
    sweeps = Sweeps(tmp_path / "launch")
    yield sweeps
    sweeps.close()
