"""How a cell ended: what it wrote itself, or else what its parent concludes and writes for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cbexp.run_status import (
    STATUS,
    SUMMARY,
    Status,
    begin_status,
    find_live_owner,
    now,
    read_json_object,
    write_status,
)
from cbexp.sweep.cells import LOG

StopReason = Literal["timed_out", "interrupted"]
DONE = ("completed", "not_applicable")
FAILURES = ("failed", "out_of_memory", "timed_out", "killed", "interrupted")
_WRITTEN_BY_CELLS = ("completed", "failed", "out_of_memory", "interrupted", "not_applicable")
_MAX_LOG_TAIL_BYTES = 4096
_MAX_LINE_LENGTH = 300


@dataclass(frozen=True)
class CellEnd:
    """How a cell ended. Only a completed one has a `summary`, only another one a `message`."""

    status: Status | Literal["not_run"]
    message: str | None = None
    summary: Mapping[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to run."""
        return self.status in DONE

    @property
    def output_tokens_per_s(self) -> float | None:
        """Throughput of the median round; None unless the cell completed."""
        value = (self.summary or {}).get("decode_tps")
        return float(value) if isinstance(value, int | float) else None


def read_end(folder: Path) -> CellEnd:
    """Return the state of a cell from its files; `killed` if they say running and its process is gone."""
    status, summary = read_json_object(folder / STATUS), read_json_object(folder / SUMMARY)
    if status is None:
        return CellEnd("not_run")
    written, message = status.get("status"), status.get("message")
    if written == "completed":
        if summary is not None:
            return CellEnd("completed", summary=summary)
        return CellEnd("killed", "its process was gone before summary.json was written")
    if written == "running":
        owner = find_live_owner(status)
        return CellEnd("running", owner) if owner else CellEnd("killed", "its process is gone")
    if written in _WRITTEN_BY_CELLS or written in FAILURES:
        return CellEnd(written, None if message is None else str(message))
    return CellEnd("not_run")


def conclude_end(
    folder: Path, returncode: int, started_at: str, reason: StopReason | None, why: str
) -> CellEnd:
    """Return how a cell ended whose process is gone, and write its status if the process could not.

    Args:
        folder: the cell's.
        returncode: the process's; below zero, the signal that ended it.
        started_at: when the process was started, in case it wrote no status.
        reason: what its parent ended it for, if it did.
        why: that in words.
    """
    end = read_end(folder)
    has_own_words = end.status in ("failed", "out_of_memory") or (end.status == "interrupted" and not reason)
    if end.is_done or has_own_words:
        return end
    end = CellEnd(reason, why) if reason else _conclude_from_returncode(folder, returncode)
    return record_end(folder, end, started_at)


def record_end(folder: Path, end: CellEnd, started_at: str | None = None) -> CellEnd:
    """Write a cell's end for it, and return the end; if it cannot be written, its message says so too.

    `started_at` is for a cell that wrote no status; None if it had no process of its own. A cell that is done keeps
    its own end, which is returned: a stop may arrive between its last record and its exit.
    """
    written = read_end(folder)
    if written.is_done:
        return written
    values = read_json_object(folder / STATUS) or _build_missing_status(started_at)
    values = {key: value for key, value in values.items() if key != "error_class"}
    try:
        write_status(folder, values | {"status": end.status, "ended_at": now(), "message": end.message})
    except OSError as error:
        lost = f"(and the status could not be written: {error.strerror})"
        return replace(end, message=f"{end.message} {lost}")
    return end


def describe_signal(number: int) -> str:
    """Return which signal ended a process, and the usual reason for SIGKILL."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        return "ended by SIGKILL; often it is the kernel, when the machine has no memory left"
    return f"ended by {name}"


def _build_missing_status(started_at: str | None) -> dict[str, Any]:
    status = begin_status() | {"pid": None}
    return status if started_at is None else status | {"started_at": started_at}


def _conclude_from_returncode(folder: Path, returncode: int) -> CellEnd:
    if returncode < 0:
        return CellEnd("killed", describe_signal(-returncode))
    last_line = _read_last_line(folder / LOG)
    hint = f"the last line of {LOG}: {last_line}" if last_line else f"{LOG} is empty"
    return CellEnd("failed", f"its process ended with exit code {returncode} and no status; {hint}")


def _read_last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_LOG_TAIL_BYTES))
            # A progress bar ends its lines with carriage returns.
            lines = re.split(r"[\r\n]", file.read().decode(errors="replace"))
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last if len(last) <= _MAX_LINE_LENGTH else f"{last[:_MAX_LINE_LENGTH]}..."
