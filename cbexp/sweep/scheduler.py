"""Runs cells in slots, on one thread, until all have ended or the sweep is asked to stop."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cbexp.errors import ResultsError
from cbexp.sweep.cells import Cell
from cbexp.sweep.ends import CellEnd, record_end
from cbexp.sweep.process import CellProcess
from cbexp.sweep.stop_signals import StopRequests

POLL_INTERVAL_S = 0.1
STOP_GRACE_S = 30.0

StartCell = Callable[[Cell, Mapping[str, str]], CellProcess]


class Observer(Protocol):
    """Is called with the events of a sweep."""

    def on_start(self, cell: Cell, slot: Mapping[str, str]) -> None:
        """A cell is about to start."""

    def on_progress(self, process: CellProcess) -> None:
        """A cell is running; called several times a second."""

    def on_end(self, cell: Cell, end: CellEnd, elapsed_s: float) -> None:
        """A cell has ended."""

    def on_stop(self, why: str, num_running: int) -> None:
        """The sweep was asked to stop, for the first or a further time."""


@dataclass
class _Running:
    process: CellProcess
    slot: Mapping[str, str]


class Scheduler:
    """Runs the cells of one sweep, each in a free slot. A cell's failure does not end the others."""

    def __init__(
        self,
        slots: Sequence[Mapping[str, str]],
        start: StartCell,
        observer: Observer,
        stops: StopRequests,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._free = deque(slots)
        self._start = start
        self._observer = observer
        self._stops = stops
        self._num_stops_seen = 0
        self._stop_grace_s = stop_grace_s
        self._running: list[_Running] = []
        self._ends: dict[int, CellEnd] = {}

    def run(self, cells: Sequence[Cell]) -> dict[int, CellEnd]:
        """Run the cells and return how each ended, by index; without those that a stop kept from starting."""
        waiting = deque(cells)
        try:
            while waiting or self._running:
                self._heed_stops()
                if self._stops.count:
                    waiting.clear()
                while waiting and self._free:
                    self._start_next(waiting.popleft())
                self._watch()
                if self._running:
                    time.sleep(POLL_INTERVAL_S)
        finally:
            self._kill_all()
        return self._ends

    def _start_next(self, cell: Cell) -> None:
        slot = self._free.popleft()
        self._observer.on_start(cell, slot)
        try:
            process = self._start(cell, slot)
        except (OSError, ResultsError) as error:  # no room on the disk, no process to be had
            self._free.append(slot)
            end = record_end(cell.folder, CellEnd("failed", f"could not be started: {error}"))
            self._finish(cell, end, 0.0)
            return
        self._running.append(_Running(process, slot))

    def _watch(self) -> None:
        for running in list(self._running):
            process = running.process
            self._observer.on_progress(process)
            if process.is_running():
                self._end_late_cell(process)
                continue
            end = process.conclude()
            self._running.remove(running)
            self._free.append(running.slot)
            self._finish(process.cell, end, process.elapsed_s)

    def _end_late_cell(self, process: CellProcess) -> None:
        limit_s = process.cell.config.cell_timeout_s
        if limit_s is not None and process.elapsed_s >= limit_s:
            why = f"not done after cell_timeout_s={limit_s:g} seconds"
            process.stop("timed_out", why, signal.SIGTERM, self._stop_grace_s)

    def _heed_stops(self) -> None:
        """Pass a first stop request on to the cells; a further one kills them."""
        if self._stops.count == self._num_stops_seen:
            return
        self._num_stops_seen = self._stops.count
        self._observer.on_stop(self._stops.why, len(self._running))
        grace_s = self._stop_grace_s if self._num_stops_seen == 1 else 0.0
        number = signal.SIGINT if self._stops.last == signal.SIGINT else signal.SIGTERM
        for running in self._running:
            running.process.stop("interrupted", self._stops.why, number, grace_s)

    def _finish(self, cell: Cell, end: CellEnd, elapsed_s: float) -> None:
        self._ends[cell.index] = end
        self._observer.on_end(cell, end, elapsed_s)

    def _kill_all(self) -> None:
        """Leave no process behind when an error ends the sweep itself."""
        for running in self._running:
            running.process.stop("interrupted", "the sweep ended by an error", signal.SIGKILL, 0.0)
            running.process.conclude()
