"""Durable writes: appending whole lines, atomic replacement, and messages for failures."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from cbexp.errors import ResultsError


def append_bytes(path: Path, data: bytes) -> None:
    """Append at once and force it to disk. After a failed write the file is cut back."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, data)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report; readers skip a torn line
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a temporary file beside it, forced to disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(descriptor, text.encode())
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file of JSON lines, and how many torn lines were skipped (0, or 1 at the end after a crash).

    Raises:
        ResultsError: a line before the last is no JSON, so the file is damaged and not just cut off.
    """
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
    return rows, 1 if rest else 0


def check_writable(path: Path) -> None:
    """Make the folder of `path` and try to write there.

    Raises:
        ResultsError: `path` is a folder or a device, or nothing can be written beside it.
    """
    if path.exists() and not path.is_file():
        raise ResultsError(f"cannot write {path}: it is no regular file. Give the path of a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"{}")
    except OSError as error:
        raise ResultsError(f"{describe_failure(path, error)} Give a path that can be written.") from error


def describe_failure(path: Path, error: OSError) -> str:
    """A sentence for users: what could not be written, why, and the free space there."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("/"))
    free = shutil.disk_usage(folder).free / 2**20
    return f"cannot write {path}: {error.strerror} ({free:,.0f} MiB free there)."


def _write_all(descriptor: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    os.fsync(descriptor)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ResultsError(f"{path}, line {number} is no JSON ({error}): the file is damaged.") from error
    return row
