"""What a cluster's job does: it runs one cell in a process of its own, and never raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig

from cbexp.cli.objective import find_objective
from cbexp.cli.sweep_display import SweepDisplay
from cbexp.sweep.cells import Cell, write_cell
from cbexp.sweep.ends import read_end
from cbexp.sweep.process import CellProcess
from cbexp.sweep.scheduler import Scheduler
from cbexp.sweep.stop_signals import counting_stop_signals


class CellTask:
    """Hydra's task function of a sweep whose jobs run elsewhere; it can be pickled. Job i runs `cells[i]`."""

    def __init__(self, cells: Sequence[Cell], num_cells: int) -> None:
        self._cells = list(cells)
        self._num_cells = num_cells

    def __call__(self, _settings: Any) -> float | None:
        """Run the job's cell unless another job has; return its objective, None when it did not complete."""
        cell = self._cells[HydraConfig.get().job.num]
        end = read_end(cell.folder)
        if not end.is_done and end.status != "running":
            with counting_stop_signals() as stops:
                display = SweepDisplay(self._cells, self._num_cells)
                end = Scheduler([{}], start_cell, display, stops).run([cell]).get(cell.index, end)
        return find_objective(cell.config, end.summary)


def start_cell(cell: Cell, slot: Mapping[str, str]) -> CellProcess:
    """Start a cell in its folder, which Hydra has made.

    Raises:
        ResultsError: the folder cannot be written.
        OSError: no process can be had.
    """
    write_cell(cell)
    return CellProcess(cell, slot)
