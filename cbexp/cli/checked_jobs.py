"""Jobs that have been composed and validated, and what jobs of one sweep must not have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cbexp.config import ExperimentConfig, to_plain_dict
from cbexp.errors import ConfigError
from cbexp.sweep.cells import hash_config
from cbexp.sweep.folder import LOCK
from cbexp.sweep.manifest import MANIFEST


@dataclass(frozen=True)
class CheckedJob:
    """One job of the command line; `subdir` is its folder in the sweep's, None for a single run.

    `overrides` are those of the job, without what all jobs share of Hydra's settings; `own_overrides` and `command`,
    which runs the job alone, are without the sweep's settings and any of Hydra's.
    """

    overrides: list[str]
    config: ExperimentConfig
    index: int
    subdir: str | None
    own_overrides: list[str]
    command: str

    @property
    def cell_hash(self) -> str:
        """What identifies the job as a cell of a sweep."""
        return hash_config(self.config)


@dataclass(frozen=True)
class CheckedCommand:
    """What a command line will run, in order.

    `output_dir` is the run's or sweep's, but for the time that a name with one has (`has_dated_dir`).
    """

    jobs: list[CheckedJob]
    output_dir: Path
    name: str
    is_multirun: bool
    is_local: bool
    has_dated_dir: bool = True


def refuse_collisions(jobs: Sequence[CheckedJob]) -> None:
    """Refuse jobs that would write to one file or folder, or of which the sweep's own settings differ."""
    path = _find_duplicate([job.config.stats_path for job in jobs if job.config.stats_path is not None])
    if path is not None:
        raise ConfigError(
            f"stats_path={path}: the jobs of this sweep would overwrite each other's file. "
            "Use a path of each job's own, as in 'stats_path=stats_${hydra:job.num}.json'."
        )
    refuse_shared_folders([str(job.subdir) for job in jobs])
    for key in ("isolation", "resume", "resume_force", "dry_run"):
        if len({getattr(job.config, key) for job in jobs}) > 1:
            raise ConfigError(
                f"{key} is a setting of the whole sweep: it must be the same in all of its jobs."
            )


def refuse_shared_folders(subdirs: Sequence[str]) -> None:
    """Refuse folders of a sweep's jobs that are not inside its own, or that lie in one another."""
    for subdir in subdirs:
        path = Path(subdir)
        if path.is_absolute() or not path.parts or {"..", MANIFEST, LOCK} & {*path.parts}:
            raise ConfigError(
                f"hydra.sweep.subdir={subdir} must be a folder of its own inside hydra.sweep.dir."
            )
    # Sorted by their parts, what lies in a folder follows it.
    for outer, inner in pairwise(sorted(Path(subdir).parts for subdir in subdirs)):
        if inner[: len(outer)] == outer:
            raise ConfigError(
                f"hydra.sweep.subdir={Path(*inner)}: jobs of this sweep would share a folder, {Path(*outer)}. "
                "Put ${hydra.job.num} into it."
            )


def refuse_equal_cells(jobs: Sequence[CheckedJob]) -> None:
    """Refuse a sweep that has one cell twice; it would be known by one hash."""
    first: dict[str, CheckedJob] = {}
    for job in jobs:
        other = first.setdefault(job.cell_hash, job)
        if other is not job:
            raise ConfigError(
                f"{_name(other)} and {_name(job)} are the same cell{_explain_equal(other, job)}"
            )


def _name(job: CheckedJob) -> str:
    return f"job {job.index} ({' '.join(job.overrides)})"


def _explain_equal(job: CheckedJob, other: CheckedJob) -> str:
    keys = list(_list_differences(to_plain_dict(job.config), to_plain_dict(other.config)))
    if not keys:
        return ". num_rounds repeats a workload."
    return (
        f": they differ in {' and '.join(keys)} alone, and that is no part of what a cell is. Give it one value; "
        "num_rounds repeats a workload."
    )


def _list_differences(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of which the values differ."""
    for key in first:
        one, other = first[key], second[key]
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            yield from _list_differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}"


def _find_duplicate(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
