"""What is left to run of an earlier sweep, and whether it may run: same code, no other process at it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from cbexp.errors import ConfigError, ResultsError
from cbexp.files import describe_failure
from cbexp.run_status import now
from cbexp.sweep.cells import Cell
from cbexp.sweep.ends import CellEnd, read_end
from cbexp.sweep.manifest import Manifest, Provenance, describe_cell

ATTEMPTS = "attempts"


def check_provenance(manifest: Manifest, current: Provenance, is_forced: bool) -> None:
    """Refuse to resume a sweep on other code than it began with.

    Raises:
        ConfigError: commit, uncommitted changes or versions differ, and `is_forced` is false.
    """
    differences = list(list_differences(manifest.provenance, current))
    if differences and not is_forced:
        raise ConfigError(
            f"the sweep was begun with {'; '.join(differences)}. Its cells would not be comparable: go back to "
            "what it was begun with, or add resume_force=true."
        )


def list_differences(begun: Provenance, current: Provenance) -> Iterator[str]:
    """Yield each difference in words: the value then, and now."""
    if begun.commit != current.commit:
        yield f"commit {_short(begun.commit)} (now {_short(current.commit)})"
    if begun.changes_hash != current.changes_hash:
        yield "other uncommitted changes than there are now"
    for name in {**begun.versions, **current.versions}:
        then, here = begun.versions.get(name), current.versions.get(name)
        if then != here:
            yield f"{name} {then or 'not installed'} (now {here or 'not installed'})"


def find_indices(manifest: Manifest, hashes: Sequence[str]) -> list[int]:
    """Return the index of each hash: the cell's in the sweep, or a new one after the last.

    Raises:
        ConfigError: the sweep has none of the cells, so the command is another sweep's.
    """
    known = {cell.cell_hash: cell.index for cell in manifest.cells}
    if manifest.cells and not known.keys() & set(hashes):
        raise ConfigError(
            "the sweep to resume has none of this command's cells. It was begun with: python -m cbexp "
            f"{' '.join(manifest.argv)}"
        )
    new = iter(range(max(known.values(), default=-1) + 1, len(known) + len(hashes) + 1))
    return [known[cell_hash] if cell_hash in known else next(new) for cell_hash in hashes]


def extend_manifest(
    manifest: Manifest, cells: Sequence[Cell], sweep_folder: Path, current: Provenance
) -> Manifest:
    """Return the manifest with the cells that are new to it and a note of this resumption."""
    known = {cell.cell_hash for cell in manifest.cells}
    new = [describe_cell(cell, sweep_folder) for cell in cells if cell.cell_hash not in known]
    note = {"resumed_at": now(), **asdict(current)}
    return replace(manifest, cells=[*manifest.cells, *new], resumed=[*manifest.resumed, note])


def list_missing(cells: Sequence[Cell], is_forced: bool) -> list[Cell]:
    """Return the cells that are neither completed nor not applicable.

    Raises:
        ResultsError: one of them is running. With `is_forced`, one on another host counts as gone.
    """
    ends = {cell.index: read_end(cell.folder) for cell in cells}
    for cell in cells:
        _refuse_running(cell, ends[cell.index], is_forced)
    return [cell for cell in cells if not ends[cell.index].is_done]


def set_aside(folder: Path) -> None:
    """Move the files of an earlier attempt at a cell into `attempts/<number>` in its folder.

    Raises:
        ResultsError: they cannot be moved, or the cell is completed.
    """
    if not folder.is_dir() or not (left := [name for name in os.listdir(folder) if name != ATTEMPTS]):
        return
    if read_end(folder).is_done:
        raise ResultsError(f"{folder} holds a completed cell: results are never overwritten.")
    attempts = folder / ATTEMPTS
    number = 1 + max((int(name) for name in _list_names(attempts) if name.isdigit()), default=0)
    try:
        target = attempts / str(number)
        target.mkdir(parents=True)
        for name in left:
            (folder / name).rename(target / name)
    except OSError as error:
        raise ResultsError(describe_failure(folder, error)) from error


def _refuse_running(cell: Cell, end: CellEnd, is_forced: bool) -> None:
    if end.status != "running":
        return
    is_here = f"on {os.uname().nodename}," in (end.message or "")
    if is_here or not is_forced:
        hint = "" if is_here else ", or add resume_force=true when that process is gone"
        raise ResultsError(
            f"cell {cell.index} is still running in {cell.folder} ({end.message}): wait for it{hint}."
        )


def _list_names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _short(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:12]
