"""Ends a process when its parent ends, even if that is killed: by the kernel on Linux, by a pipe anywhere."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

LIFELINE = "CBEXP_LIFELINE_FD"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process and its children killed when the parent's end of the pipe `LIFELINE` closes.

    The pipe ends the children too, but needs this interpreter to run; the kernel needs nothing.
    """
    descriptor = int(os.environ.pop(LIFELINE))
    os.set_inheritable(descriptor, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_parent, args=(descriptor,), name="lifeline", daemon=True).start()


def _wait_for_parent(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: it returns when the other end is closed
    os.killpg(os.getpgid(0), signal.SIGKILL)
