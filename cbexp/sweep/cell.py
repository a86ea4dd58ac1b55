"""The process of one cell: `python -m cbexp.sweep.cell FOLDER` runs the cell described in that folder."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from cbexp.errors import CbexpError
from cbexp.sweep.cells import read_cell
from cbexp.sweep.lifeline import end_with_parent
from cbexp.sweep.stop_signals import STOP_SIGNALS, describe_stop, raise_interrupt


def main(folder: Path) -> int:
    """Run the cell in `folder`. Exit code 0 means that its end is recorded in the folder's status.json."""
    end_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it has no terminal to lose
    _handle_stops(_exit_at_once)
    cell = read_cell(folder)
    from cbexp.experiment import run_experiment  # late: until here nothing took long

    _handle_stops(raise_interrupt)
    try:
        run_experiment(cell.config, cell.folder, list(cell.overrides), cell.sweep)
    except CbexpError as error:
        sys.stderr.write(f"cbexp: {error}\n")
        return 1
    except Exception:  # noqa: BLE001 - a bug: the log gets its traceback, the sweep's table its last line
        traceback.print_exc()
        return 1
    return 0


def _handle_stops(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle the signals that ask for an end, also those that were ignored where the sweep was started."""
    for number in (signal.SIGINT, *(number for number in STOP_SIGNALS if number != signal.SIGHUP)):
        signal.signal(number, handler)


def _exit_at_once(number: int, _frame: FrameType | None) -> None:
    """End during imports: nothing is lost yet, and some libraries swallow a KeyboardInterrupt."""
    sys.stderr.write(f"{describe_stop(number)}\n")
    sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"{stop}\n")
        sys.exit(130)
