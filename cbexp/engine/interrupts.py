"""Puts Ctrl-C, and other signals that ask for an end, off while something is done that must not stay half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Those that callers, batch systems and closing terminals stop a program with; SIGALRM and others are not for that.
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Run the body to its end; the first signal that came meanwhile goes to its handler afterwards.

    Off the main thread, which alone gets signals, this does nothing; nor to signals that are ignored, or that end the
    process without a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _python_handlers()
    received: list[int] = []
    is_over = False

    def take(number: int, frame: FrameType | None) -> None:
        # A signal that comes while handlers are put back goes straight to its own handler.
        if is_over:
            handlers[signal.Signals(number)](number, frame)
        else:
            received.append(number)

    try:
        for number in handlers:
            signal.signal(number, take)
        yield
    finally:
        is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            handlers[signal.Signals(received[0])](received[0], None)


def _python_handlers() -> dict[signal.Signals, Callable[..., Any]]:
    """Of the deferred signals, those that run Python code."""
    found = {number: signal.getsignal(number) for number in _DEFERRED}
    return {number: handler for number, handler in found.items() if callable(handler)}
