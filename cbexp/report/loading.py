"""Finds the runs below some folders and reads them, also half-written ones."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cbexp.report.errors import ReportError
from cbexp.report.json_files import Reader, lookup, number, strings, text
from cbexp.report.run import Run, TimedRound
from cbexp.run_status import find_live_owner

RUN_FILES = ("status.json", "summary.json", "rounds.jsonl", "cell.json")
SWEEP_FILE = "sweep.json"
EARLIER_ATTEMPTS = "attempts"  # of a cell that was run again


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs in or below the folders, those of a sweep in its order.

    Links are followed, and each folder counts once. Other folders are skipped. Half-written, torn and killed runs are
    read as far as possible. Cells that sweep.json names and that have no records are `not_started`. A sweep.json that
    names no cells is an `unreadable` run, so that missing cells do not go unnoticed.

    Raises:
        ReportError: a path does not exist, or its folder cannot be read.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not os.path.exists(path):
            raise ReportError(
                f"{path} is not there. Give the folders of runs or sweeps, as outputs/NAME/DATE."
            )
        for run in _load_below(path if path.is_dir() else path.parent):
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def _load_below(root: Path) -> Iterator[Run]:
    """The runs of a tree, in order of their names; a sweep's cells follow sweep.json."""
    loaded: set[Path] = set()
    for path, names, files in _walk_once(root):
        runs = list(_load_cells(path)) if SWEEP_FILE in files else []
        if path not in loaded and any(name in files for name in RUN_FILES):
            runs.append(load_run(path))
        if path in loaded or runs:
            names[:] = [name for name in names if name != EARLIER_ATTEMPTS]
        loaded |= {run.folder for run in runs}
        yield from runs


def _walk_once(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Like `os.walk`, with sorted names and through links. No folder comes twice, so a loop of links ends."""
    seen: set[str] = set()
    for folder, names, files in os.walk(root, onerror=partial(_refuse_unreadable, root), followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            names.clear()
            continue
        seen.add(place)
        names[:] = sorted((name for name in names if not _leads_up(folder, name)), key=_natural_order)
        yield Path(folder), names, files


def _leads_up(folder: str, name: str) -> bool:
    """Whether a name links to its own folder or one above it, which could lead through the whole disk."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def load_run(folder: Path, cell: Mapping[str, Any] | None = None, sweep_name: str | None = None) -> Run:
    """Read one run's folder. `cell` and `sweep_name` come from its sweep, for folders that lack them."""
    reader = Reader(folder)
    cell = reader.read_object("cell.json") or cell or {}
    status, summary = reader.read_object("status.json"), reader.read_object("summary.json")
    shown, message = _resolve_status(status, summary)
    if not reader.remarks and not any(os.path.exists(folder / name) for name in RUN_FILES[:-1]):
        shown, message = "not_started", None
    overrides = _overrides(reader, cell)
    rounds, warmup_rounds_s = _read_rounds(reader)
    return Run(
        folder=folder,
        name=text(summary or {}, "name") or sweep_name or folder.name,
        status=shown,
        message=message,
        overrides=overrides,
        command=text(cell, "command") or _command(overrides),
        status_record=status or {},
        summary=summary or {},
        engine=reader.read_object("engine.json") or {},
        environment=reader.read_object("environment.json") or {},
        rounds=rounds,
        warmup_rounds_s=warmup_rounds_s,
        remarks=tuple(reader.remarks),
    )


def _resolve_status(
    status: Mapping[str, Any] | None, summary: Mapping[str, Any] | None
) -> tuple[str, str | None]:
    """The status to show and its message, from status.json and summary.json; None for an unreadable file."""
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


def _refuse_unreadable(root: Path, error: OSError) -> None:
    """Refuse an unreadable root. Unreadable folders below are skipped: sweep.json lists the cells."""
    if Path(str(error.filename)) == root:
        raise ReportError(f"{root} cannot be read: {error.strerror}.") from error


def _load_cells(sweep_folder: Path) -> Iterator[Run]:
    sweep = Reader(sweep_folder).read_object(SWEEP_FILE) or {}
    cells = lookup(sweep, "cells")
    if not isinstance(cells, list):
        yield _unreadable_sweep(sweep_folder, "it is torn or names no cells")
        return
    for cell in cells:
        folder = _locate(sweep_folder, text(cell, "folder") if isinstance(cell, Mapping) else None)
        if folder is None:
            yield _unreadable_sweep(sweep_folder, "it names a cell without a folder that can be")
        else:
            yield load_run(folder, cell, text(sweep, "name"))


def _unreadable_sweep(folder: Path, why: str) -> Run:
    message = f"{SWEEP_FILE}: {why}, so that cells without records of their own are not shown"
    return replace(load_run(folder), status="unreadable", message=message)


def _locate(sweep_folder: Path, recorded: str | None) -> Path | None:
    """A cell's folder, also after the sweep was moved or copied; None if no path can be made of it."""
    if not recorded:
        return None
    try:
        is_there = (sweep_folder / recorded).is_dir()
        folder = sweep_folder / (recorded if is_there else Path(recorded).name)
        folder.resolve()
    except (OSError, ValueError):  # too long, or not the name of any file
        return None
    return folder


def _overrides(reader: Reader, cell: Mapping[str, Any]) -> tuple[str, ...]:
    """From cell.json or sweep.json, else from a list beside the records, else from Hydra's own record."""
    found = (
        strings(cell, "overrides")
        or reader.read_list("overrides.yaml")
        or reader.read_list(".hydra/overrides.yaml")
    )
    return tuple(found)


def _command(overrides: Sequence[str]) -> str | None:
    return shlex.join(["python", "-m", "cbexp", *overrides]) if overrides else None


def _read_rounds(reader: Reader) -> tuple[tuple[TimedRound, ...], float]:
    """The timed rounds, and the total seconds of the warmup rounds."""
    timed, warmup_s = [], 0.0
    for row in reader.read_rows("rounds.jsonl"):
        wall_s, num_tokens = number(row, "wall_s"), number(row, "num_output_tokens")
        if wall_s is None or wall_s <= 0 or num_tokens is None or num_tokens < 0:
            continue
        if row.get("is_warmup") is False:
            timed.append(TimedRound(wall_s, num_tokens, row))
        else:
            warmup_s += wall_s
    return tuple(timed), warmup_s


def _natural_order(name: str) -> tuple[int, str]:
    """Sort key by which job folder `10_...` comes after `9_...`."""
    leading = re.match(r"\d+", name)
    return (int(leading.group()) if leading else -1, name)
