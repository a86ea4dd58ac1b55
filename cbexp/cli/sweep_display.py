"""What a sweep says while it runs: each cell's start, rounds and end; the report when it is over."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from cbexp.cli.launching import quote
from cbexp.cli.terminal import say
from cbexp.display.units import format_path
from cbexp.report import format_report, load_runs
from cbexp.report.text_table import printable
from cbexp.sweep.cells import LOG, Cell
from cbexp.sweep.ends import CellEnd
from cbexp.sweep.process import CellProcess
from cbexp.sweep.slots import VISIBLE

PROGRESS_INTERVAL_S = 5.0
MAX_OVERRIDES_LENGTH = 500


class SweepDisplay:
    """Lines about some cells of a sweep; `num_cells` is how many it has."""

    def __init__(self, cells: Sequence[Cell], num_cells: int) -> None:
        self._num_cells = num_cells
        self._shared = set.intersection(*(set(cell.overrides) for cell in cells)) if len(cells) > 1 else set()
        self._shown_s: dict[int, float] = {}
        self._read_bytes: dict[int, int] = {}

    def on_start(self, cell: Cell, slot: Mapping[str, str]) -> None:
        """Say which cell starts, with the overrides that the others lack, and on which of several GPUs."""
        where = f" on GPU {slot[VISIBLE]}" if VISIBLE in slot else ""
        own = " ".join(override for override in cell.overrides if override not in self._shared)
        say(f"{self._name(cell)} starts{where}: {_on_one_line(own)}")

    def on_progress(self, process: CellProcess) -> None:
        """Say which round has ended last, not more often than somebody would read it."""
        cell = process.cell
        if process.elapsed_s - self._shown_s.get(cell.index, 0.0) < PROGRESS_INTERVAL_S:
            return
        self._shown_s[cell.index] = process.elapsed_s
        start = self._read_bytes.get(cell.index, 0)
        lines = _read_whole_lines(cell.folder / "rounds.jsonl", start)
        self._read_bytes[cell.index] = start + len(lines)
        for line in lines.splitlines()[-1:]:
            text = _describe_round(line, cell.config.num_warmup_rounds, cell.config.num_rounds)
            if text:
                say(f"{self._name(cell)}: {text}")

    def on_end(self, cell: Cell, end: CellEnd, elapsed_s: float) -> None:
        """Say how it ended; of a failure why, and where it is recorded."""
        text = f"{self._name(cell)} {end.status} after {elapsed_s:,.1f} s"
        if end.output_tokens_per_s is not None:
            text += f", {end.output_tokens_per_s:,.0f} output tokens/s"
        if end.message:
            text += f": {printable(end.message)}"
        if not end.is_done:
            log = cell.folder / LOG  # a cell that never started has none, nor one in the sweep's own process
            text += f"\n  {format_path(log if log.exists() else cell.folder)}"
        say(text)

    def on_stop(self, why: str, num_running: int) -> None:
        """Say that the sweep ends, and how to make that faster."""
        say(f"{why}: {num_running} running cell(s) are ending; once more kills them")

    def _name(self, cell: Cell) -> str:
        return f"cell {cell.index} of {self._num_cells}"


def say_report(sweep_folder: Path, ends: Sequence[CellEnd], other_ends: Sequence[CellEnd]) -> None:
    """Print the sweep's table with what failed and why, and how many cells are done.

    Args:
        sweep_folder: the sweep's.
        ends: how the cells of this command ended.
        other_ends: how those cells of the sweep stand that this command does not have.
    """
    say(format_report(load_runs([sweep_folder])))
    num_done = sum(end.is_done for end in (*ends, *other_ends))
    say(f"{num_done} of {len(ends) + len(other_ends)} cells are done: {format_path(sweep_folder)}")
    if not all(end.is_done for end in ends):
        resume = _format_resume(sweep_folder)
        say(f"To run what is missing, give the same command with {resume} (or resume=latest).")
    elif not all(end.is_done for end in other_ends):
        say("This command has all of its cells; sweep.json has the command of the others.")


def _format_resume(sweep_folder: Path) -> str:
    """The override that resumes the sweep, as a shell takes it."""
    folder = format_path(sweep_folder)
    is_plain = re.fullmatch(r"[\w./-]+", folder, re.ASCII)
    return f"resume={folder}" if is_plain else shlex.quote(f"resume={quote(folder)}")


def _on_one_line(text: str) -> str:
    shown = printable(text).replace("\n", " ")
    return shown if len(shown) <= MAX_OVERRIDES_LENGTH else f"{shown[:MAX_OVERRIDES_LENGTH]}..."


def _read_whole_lines(path: Path, start: int) -> bytes:
    """What a file has from byte `start` on, up to its last line's end; nothing while there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            new = file.read()
    except OSError:
        return b""
    return new[: new.rfind(b"\n") + 1]


def _describe_round(line: bytes, num_warmup_rounds: int, num_rounds: int) -> str | None:
    try:
        record = json.loads(line)
        if record["is_warmup"]:
            return f"warmup round, {record['wall_s']:,.1f} s"
        number = record["round_index"] - num_warmup_rounds + 1
        return f"round {number} of {num_rounds}, {record['output_tokens_per_s']:,.0f} output tokens/s"
    except (ValueError, KeyError, TypeError):  # no round's line: the cell's end says what is wrong
        return None
