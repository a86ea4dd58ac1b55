"""A sweep's folder: made for one sweep, locked while it runs, found when it is resumed."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cbexp.errors import ConfigError, ResultsError
from cbexp.files import describe_failure
from cbexp.run_status import read_json_object
from cbexp.sweep.manifest import MANIFEST

LOCK = ".lock"
LATEST = "latest"
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)


def claim_folder(wanted: Path) -> Path:
    """Make and return `wanted`, or the first of `wanted_2`, `wanted_3`, … that does not exist.

    Raises:
        ConfigError: `wanted` names no new folder: it is `.`, `..` or `/`.
        ResultsError: it cannot be made.
    """
    if wanted.name in ("", ".."):
        raise ConfigError(f"hydra.sweep.dir={wanted} must name a folder for this sweep alone.")
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        return next(folder for folder in _name_candidates(wanted) if _make(folder))
    except OSError as error:
        raise ResultsError(
            f"{describe_failure(wanted, error)} Choose another place with hydra.sweep.dir."
        ) from error


def _name_candidates(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}_{number}")


def _make(folder: Path) -> bool:
    """Whether this call made the folder; of two sweeps at once, only one does."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def locked(sweep_folder: Path) -> Iterator[None]:
    """Hold the sweep's lock. It ends with the process that holds it, even if that is killed.

    Raises:
        ResultsError: another process holds it, so the sweep is running.
    """
    try:
        descriptor = os.open(sweep_folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ResultsError(describe_failure(sweep_folder / LOCK, error)) from error
    try:
        _lock(descriptor, sweep_folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, sweep_folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks; there only the cells' status shows that they run.
        if error.errno in _HELD_BY_ANOTHER:
            raise ResultsError(
                f"the sweep in {sweep_folder} is going on in another process: wait for it, or end that process."
            ) from error


def find_sweep(resume: str, outputs: Path, name: str | None = None) -> Path:
    """Return the folder that `resume` names. `latest` is the newest sweep in `outputs`.

    With `name`, it is the newest of those whose folder `claim_folder` made for that name.

    Raises:
        ConfigError: there is none.
    """
    if resume != LATEST:
        folder = Path(resume)
        if not folder.is_dir():
            raise ConfigError(f"resume={resume}: there is no such folder.")
        if not (folder / MANIFEST).is_file():
            raise ConfigError(f"resume={resume}: this is no sweep's folder, it has no {MANIFEST}.")
        return folder
    sweeps = [path.parent for path in outputs.glob(f"*/{MANIFEST}")]
    if name is not None:
        sweeps = [folder for folder in sweeps if _is_candidate(folder.name, name)]
    if not sweeps:
        where = outputs if name is None else f"{outputs / name}, which hydra.sweep.dir names"
        raise ConfigError(f"resume=latest: there is no sweep in {where}. Give its folder instead.")
    return max(sweeps, key=_created_at)


def _is_candidate(name: str, wanted: str) -> bool:
    """Whether `claim_folder(wanted)` may make a folder of this name."""
    return re.fullmatch(rf"{re.escape(wanted)}(_\d+)?", name) is not None


def _created_at(sweep_folder: Path) -> tuple[str, str]:
    """When a sweep began. The folder's name, which has the time too, decides within a second."""
    manifest = sweep_folder / MANIFEST
    values = read_json_object(manifest) or {}
    # A damaged manifest has no time. Skipping it would resume an older sweep in its place.
    written_at = datetime.fromtimestamp(manifest.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return str(values.get("created_at", written_at)), sweep_folder.name
