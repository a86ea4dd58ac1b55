"""The signals that ask a sweep or a cell to end: Ctrl-C, and those of batch systems and closing terminals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# SIGUSR2 is submitit's own before the end of a Slurm job's time.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequests:
    """Counts the requests to stop. `last` is the signal of the latest."""

    def __init__(self) -> None:
        self.count = 0
        self.last: signal.Signals | None = None

    def add(self, number: int, _frame: FrameType | None) -> None:
        """Take note of a signal (a signal handler)."""
        self.count += 1
        self.last = signal.Signals(number)

    @property
    def why(self) -> str:
        """The latest request in words."""
        return "" if self.last is None else describe_stop(self.last)


def describe_stop(number: int) -> str:
    """Return a message for a stop by a signal."""
    name = signal.Signals(number).name
    return "stopped by Ctrl-C" if name == "SIGINT" else f"stopped by {name}"


@contextmanager
def counting_stop_signals() -> Iterator[StopRequests]:
    """Count Ctrl-C and `STOP_SIGNALS` instead of ending by them."""
    requests = StopRequests()
    with _handling((signal.SIGINT, *STOP_SIGNALS), requests.add):
        yield requests


@contextmanager
def interrupting_by_stop_signals() -> Iterator[None]:
    """Let `STOP_SIGNALS` raise KeyboardInterrupt, as Ctrl-C does."""
    with _handling(STOP_SIGNALS, raise_interrupt):
        yield


def raise_interrupt(number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt with the signal's name (a signal handler)."""
    raise KeyboardInterrupt(describe_stop(number))


@contextmanager
def _handling(
    signals: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Handle `signals` but those that are ignored; a shell, or nohup, has its reason to ignore one."""
    previous = {number: signal.getsignal(number) for number in signals}
    handled = [number for number in signals if previous[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number] or signal.SIG_DFL)
