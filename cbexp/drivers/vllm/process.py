"""A worker process under an interpreter of its own: JSON lines over pipes, a log of all it prints, an end with ours."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cbexp.engine.types import EngineError
from cbexp.errors import ConfigError

POLL_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 30.0
READ_BYTES = 2**20
GUARD = Path(__file__).with_name("guard.py")


class WorkerEndedError(Exception):
    """The worker process is gone; the message says how it ended."""


class WorkerMessageError(Exception):
    """The worker wrote what is no message; the message here says what."""


class WorkerTimeoutError(Exception):
    """The worker has not answered in time."""


class WorkerProcess:
    """Starts `command` in a process group of its own, which `guard.py` leads and ends when this process is gone.

    It takes JSON lines on stdin and gives JSON lines on stdout; stderr goes to `log_path`, which is begun anew.

    Raises:
        ConfigError: the command's program cannot be started.
        EngineError: its log cannot be written.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        with _open_log(log_path) as log:
            self._guard = _start_guard(log)
            try:
                self._process = _start(command, environment, log, self._guard.pid)
            except BaseException:
                _kill_group(self._guard)
                raise
        assert self._process.stdin is not None  # for the type checker: both are pipes
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message.

        Raises:
            WorkerEndedError: nobody reads it.
        """
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def receive(
        self, timeout_s: float | None = None, on_wait: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait for the next message; `on_wait` is called about once a second until it is there.

        Raises:
            WorkerEndedError: the process ended.
            WorkerMessageError: what it wrote is no message.
            WorkerTimeoutError: there was none within `timeout_s` (None: no limit).
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (line := self._take_line()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise WorkerTimeoutError
            if select.select([self._stdout], [], [], POLL_INTERVAL_S)[0]:
                self._read()
            else:
                on_wait()
        return _parse(line)

    def stop(self) -> None:
        """End the process and all that it started, kindly first; safe to call twice."""
        try:
            self._stdin.write(b'{"command": "close"}\n')
            self._stdin.flush()
            self._process.wait(CLOSE_TIMEOUT_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass  # gone already, closed before, or stuck: what follows ends it
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process and all that it started at once; safe to call twice."""
        _kill_group(self._guard)
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):  # the rest of a message that nobody reads
                pipe.close()

    def _read(self) -> None:
        chunk = os.read(self._stdout.fileno(), READ_BYTES)
        if not chunk:
            raise self._ended()
        self._buffer += chunk

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _ended(self) -> WorkerEndedError:
        try:
            code = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerEndedError("it closed its pipe and still runs")
        if code >= 0:
            return WorkerEndedError(f"exit code {code}")
        name = _name_signal(-code)
        hint = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
        return WorkerEndedError(f"killed by {name}{hint}")


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        raise EngineError(f"the worker's log {path} cannot be written: {error.strerror}.") from error


def _start_guard(log: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C is for us alone; and all that the worker starts can be ended together
        )
    except OSError as error:
        raise EngineError(f"the worker's guard cannot be started: {error.strerror}.") from error


def _kill_group(guard: subprocess.Popen[bytes]) -> None:
    """End the guard's group, which outlives the worker where vLLM's engine is left of it; safe to call twice."""
    if guard.returncode is not None:
        return
    with suppress(PermissionError):  # macOS, of a group of zombies
        os.killpg(guard.pid, signal.SIGKILL)
    guard.communicate()


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: BinaryIO, group: int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=group,
        )
    except OSError as error:
        raise ConfigError(f"driver.python={command[0]} cannot be started: {error.strerror}.") from error


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name of its own
        return f"signal {number}"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise WorkerMessageError(f"it wrote what is no message: {line[:200]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("event"), str):
        raise WorkerMessageError(f"it wrote what is no message: {line[:200]!r}")
    return message
