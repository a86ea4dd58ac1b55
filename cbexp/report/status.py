"""What became of a run: the status that it wrote, unless its process is gone or its files say otherwise."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psutil

from cbexp.report.json_files import number, text

CLOCK_TOLERANCE_S = 2.0  # started_at has whole seconds and is written a little after the process started


def resolve_status(
    status: Mapping[str, Any] | None, summary: Mapping[str, Any] | None
) -> tuple[str, str | None]:
    """The status to show and its message, from the content of status.json and summary.json where they can be read."""
    written = None if status is None else text(status, "status")
    message = None if status is None else text(status, "message")
    if written is None:
        if summary is not None and text(summary, "status") == "completed":
            return "completed", message
        return "unreadable", "no status.json that can be read, and no summary.json"
    if written == "completed" and summary is None:
        return "unreadable", "status.json says completed, but there is no summary.json that can be read"
    if written == "running" and status is not None and _is_process_gone(status):
        host = text(status, "host") or "its host"
        return "killed", f"status.json says running, but its process is gone from {host}"
    return written, message


def _is_process_gone(status: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this status lives no more; unknown, so False, when it was another host's."""
    pid = number(status, "pid")
    if pid is None or text(status, "host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(pid))
        return process.status() == psutil.STATUS_ZOMBIE or _began_after(process, text(status, "started_at"))
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, ValueError):
        return False


def _began_after(process: psutil.Process, started_at: str | None) -> bool:
    """Whether a process is younger than the run, so that the number has been given out again."""
    try:
        started_s = datetime.fromisoformat(started_at or "").timestamp()
    except ValueError:
        return False
    return process.create_time() > started_s + CLOCK_TOLERANCE_S
