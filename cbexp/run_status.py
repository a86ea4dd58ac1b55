"""The status of a run: reads and writes status.json, and finds out whether its process still lives."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from cbexp.files import replace_text

Status = Literal[
    "running",
    "completed",
    "failed",
    "out_of_memory",
    "interrupted",
    "not_applicable",
    "timed_out",
    "killed",
]

STATUS, SUMMARY = "status.json", "summary.json"
CLOCK_TOLERANCE_S = 2.0  # started_at has whole seconds, and is written after the process has started


def begin_status() -> dict[str, Any]:
    """Return the status of a run that this process begins."""
    return {"status": "running", "pid": os.getpid(), "host": socket.gethostname(), "started_at": now()}


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, unreadable, or no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def write_status(folder: Path, values: Mapping[str, Any]) -> None:
    """Write status.json. On a full disk the old file is overwritten in place, which takes no new space.

    Raises:
        OSError: not even that is possible.
    """
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    try:
        replace_text(folder / STATUS, text)
    except OSError:
        with (folder / STATUS).open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def find_live_owner(status: Mapping[str, Any] | None) -> str | None:
    """The process of a running run, if it lives or is on another host and may; None otherwise."""
    if status is None or status.get("status") != "running":
        return None
    pid, host, started_at = status.get("pid"), status.get("host"), status.get("started_at")
    if not isinstance(pid, int) or not isinstance(host, str) or not isinstance(started_at, str):
        return None
    is_live = host != socket.gethostname() or _is_alive(pid, started_at)
    return f"process {pid} on {host}, since {started_at}" if is_live else None


def now() -> str:
    """The time in the form of records: UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_alive(pid: int, started_at: str) -> bool:
    """Whether the process lives. One that is younger than the run is another one with the same pid."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.create_time() <= datetime.fromisoformat(started_at).timestamp() + CLOCK_TOLERANCE_S
    except (psutil.NoSuchProcess, ValueError):
        return False
    except psutil.AccessDenied:
        return True
