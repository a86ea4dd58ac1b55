"""The process of one cell, in a session of its own: its start, its signals, and its end with all children."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import cbexp
from cbexp.run_status import now
from cbexp.sweep.cells import LOG, Cell
from cbexp.sweep.ends import CellEnd, StopReason, conclude_end
from cbexp.sweep.lifeline import LIFELINE


class CellProcess:
    """A running cell. All that it prints goes to `log`."""

    def __init__(self, cell: Cell, variables: Mapping[str, str]) -> None:
        """Start it with `variables` added to the environment. Raises OSError if it cannot be started."""
        self.cell = cell
        self.log = cell.folder / LOG
        self.started_s = time.monotonic()
        self._started_at = now()
        self._reason: StopReason | None = None
        self._why = ""
        self._kill_at_s: float | None = None
        reading, self._lifeline = os.pipe()
        try:
            self._process = self._start(variables, reading)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        """The id of the process, which is also that of its session and group."""
        return self._process.pid

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started_s

    def is_running(self) -> bool:
        """Whether it still runs. Kills it if it was asked to stop and its time is over."""
        if self._process.poll() is not None:
            return False
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            self._kill_group()
        return True

    def stop(self, reason: StopReason, why: str, number: signal.Signals, grace_s: float) -> None:
        """Ask it once to end, by a signal. What is left of it after `grace_s` is killed."""
        if self._reason is None:
            self._reason, self._why = reason, why
            self._process.send_signal(number)
        deadline_s = time.monotonic() + grace_s
        self._kill_at_s = min(deadline_s, self._kill_at_s or deadline_s)

    def conclude(self) -> CellEnd:
        """Return how it ended, once it has. Children that it left behind are killed."""
        returncode = self._process.wait()
        self._kill_group()
        os.close(self._lifeline)
        return conclude_end(self.cell.folder, returncode, self._started_at, self._reason, self._why)

    def _start(self, variables: Mapping[str, str], lifeline: int) -> subprocess.Popen[bytes]:
        environment = os.environ | variables | {LIFELINE: str(lifeline)} | _python_path()
        # -P: what lies in the launch folder must not stand for a library's module.
        command = [sys.executable, "-P", "-m", "cbexp.sweep.cell", str(self.cell.folder.absolute())]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline],
                start_new_session=True,  # Ctrl-C on the terminal is its parent's to deliver
            )

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


def _python_path() -> dict[str, str]:
    """The variable by which a checkout's cbexp is found from any folder; nothing for an installed one."""
    root = str(Path(cbexp.__file__).parents[1])
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
