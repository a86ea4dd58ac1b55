"""Measures on the device how long it waits for the host between bursts and batches of prompts."""

from __future__ import annotations

from collections import deque

import torch

Work = tuple[torch.cuda.Event, torch.cuda.Event]


class DeviceIdle:
    """Adds up pieces of work as busy time, and as idle time what lies between one's end and the next one's start.

    A piece is busy from its first event to its last: gaps between its kernels are not seen. Events are read once they
    are over, so that measuring never waits.
    """

    def __init__(self) -> None:
        self._busy_ms = 0.0
        self._idle_ms = 0.0
        self._last_end: torch.cuda.Event | None = None
        self._unread: deque[Work | None] = deque()

    @property
    def share(self) -> float | None:
        """Idle time as a share of both, in [0, 1]; None when nothing was measured."""
        self._read()
        total_ms = self._busy_ms + self._idle_ms
        return self._idle_ms / total_ms if total_ms > 0 else None

    def begin(self) -> None:
        """Leave out what passes until the next piece of work: a drive begins."""
        self._unread.append(None)
        self._read()

    def add(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Count a piece of work by its events, recorded in the order of all others and made to be timed."""
        self._unread.append((start, end))
        self._read()

    def _read(self) -> None:
        while self._unread and (self._unread[0] is None or self._unread[0][1].query()):
            work = self._unread.popleft()
            if work is None:
                self._last_end = None
            else:
                self._count(*work)

    def _count(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        if self._last_end is not None:
            self._idle_ms += self._last_end.elapsed_time(start)
        self._busy_ms += start.elapsed_time(end)
        self._last_end = end
