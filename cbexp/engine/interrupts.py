"""Puts Ctrl-C off while something is done that must not stay half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Run the body to its end; a SIGINT that came meanwhile goes to its handler afterwards.

    Off the main thread, which alone gets signals, and where SIGINT is ignored, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(received[0], None)
