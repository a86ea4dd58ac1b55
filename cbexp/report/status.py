"""What became of a run: the status that it wrote, unless its process is gone or its files say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbexp.report.json_files import text
from cbexp.run_status import find_live_owner


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
    if written == "running" and find_live_owner(status) is None:
        return "killed", "status.json says running, but its process is gone and left no reason"
    return written, message
