"""Measures on the device how long it waits for the host between bursts that follow each other."""

from __future__ import annotations

import torch


class DeviceIdle:
    """Adds up a burst's steps as busy time, and as idle time what lies between its end and the start of the next one.

    Prompts that are read in between (`interrupt`) count as neither.
    """

    def __init__(self) -> None:
        self._busy_ms = 0.0
        self._idle_ms = 0.0
        self._last_end: torch.cuda.Event | None = None

    @property
    def share(self) -> float | None:
        """Idle time as a share of both, in [0, 1]; None when nothing was measured."""
        total_ms = self._busy_ms + self._idle_ms
        return self._idle_ms / total_ms if total_ms > 0 else None

    def add(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Count a burst by its events, both over and made to be timed."""
        if self._last_end is not None:
            self._idle_ms += self._last_end.elapsed_time(start)
        self._busy_ms += start.elapsed_time(end)
        self._last_end = end

    def interrupt(self) -> None:
        """Something else than a burst runs now."""
        self._last_end = None
