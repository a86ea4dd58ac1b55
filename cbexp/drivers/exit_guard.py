"""Stops what the caller forgot to stop, when the main thread ends."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

_lock = threading.Lock()
_running: set[StopsAtExit] = set()
_guard: threading.Thread | None = None


class StopsAtExit(ABC):
    """Runs a thread that is no daemon and ends only when stopped: the interpreter would wait for it forever.

    `atexit` is too late: its functions run after such threads have been joined.
    """

    @abstractmethod
    def stop(self) -> None:
        """Stop and join the thread; it must call `forget_exit`."""

    def stop_at_exit(self) -> None:
        """Have `stop` called when the main thread ends."""
        global _guard
        with _lock:
            _running.add(self)
            if _guard is None:
                _guard = threading.Thread(target=_stop_all, name="cbexp-exit-guard")
                _guard.start()

    def forget_exit(self) -> None:
        """Take `stop_at_exit` back."""
        with _lock:
            _running.discard(self)


def _stop_all() -> None:
    threading.main_thread().join()
    for running in list(_running):
        running.stop()
