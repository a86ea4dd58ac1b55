"""Writes the command line's own messages, also when nobody reads them any more."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress

_READER_GONE = (errno.EPIPE, errno.EIO)


def say(text: str) -> None:
    """Write a line for the user, at once; when its reader has gone (`| head`, a closed terminal), go on unseen."""
    if sys.stdout is None:  # closed before the start (`>&-`)
        return
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        silence_stdout()
        if error.errno not in _READER_GONE:
            _say_to_stderr(f"standard output cannot be written ({error.strerror}): going on without it")


def silence_stdout() -> None:
    """Write nothing more to standard output, whose reader has gone."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def report_error(error: Exception) -> None:
    """Write an error for the user as its message alone; with `HYDRA_FULL_ERROR=1` the traceback comes first."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    _say_to_stderr(f"cbexp: {error}")


def _say_to_stderr(text: str) -> None:
    if sys.stderr is None:
        return
    with suppress(OSError):  # nobody is left to read it
        sys.stderr.write(f"{text}\n")
