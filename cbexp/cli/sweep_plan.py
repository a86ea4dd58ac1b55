"""Which cells a sweep has and which of them run: a new one's all, of a resumed one those that are missing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cbexp.cli.checked_jobs import CheckedCommand, CheckedJob, refuse_shared_folders
from cbexp.cli.preflight import check_command
from cbexp.config import SweepInfo
from cbexp.sweep.cells import Cell
from cbexp.sweep.manifest import (
    Manifest,
    Provenance,
    build_manifest,
    find_provenance,
    read_manifest,
    write_manifest,
)
from cbexp.sweep.resume import check_provenance, extend_manifest, find_indices, list_missing


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and the overrides from which Hydra composes it again."""

    cell: Cell
    composed_from: list[str]


@dataclass(frozen=True)
class SweepPlan:
    """The cells of a command line in their sweep, in order, and those of them that are to run.

    `others` are the folders of the sweep's cells that the command line does not have.
    """

    cells: list[PlannedCell]
    to_run: list[PlannedCell]
    name: str
    others: list[Path]

    @property
    def num_cells(self) -> int:
        """How many cells the sweep has."""
        return len(self.cells) + len(self.others)


def begin_sweep(command: CheckedCommand, argv: Sequence[str], sweep_folder: Path) -> SweepPlan:
    """Return the plan of a new sweep and write its manifest; raises ResultsError when that cannot be written."""
    name = f"{command.name}_{sweep_folder.name}"
    cells = _plan_cells(command.jobs, sweep_folder, name, len(command.jobs))
    manifest = build_manifest(name, argv, [item.cell for item in cells], sweep_folder, find_provenance())
    write_manifest(sweep_folder, manifest)
    return SweepPlan(cells, cells, name, others=[])


def resume_sweep(command: CheckedCommand, args: Namespace, conf_dir: Path, sweep_folder: Path) -> SweepPlan:
    """Return what is missing of the sweep in `sweep_folder`, and note the resumption in its manifest.

    Raises:
        ConfigError: it is another command's sweep, or was begun on other code and is not forced.
        ResultsError: a cell is still running, or the manifest cannot be written.
    """
    manifest, current = read_manifest(sweep_folder), find_provenance()
    is_forced = command.jobs[0].config.resume_force
    check_provenance(manifest, current, is_forced)
    cells, others = _place_cells(command, args, conf_dir, sweep_folder, manifest)
    missing = {cell.index for cell in list_missing([item.cell for item in cells], is_forced)}
    _note_resumption(manifest, cells, sweep_folder, current)
    to_run = [item for item in cells if item.cell.index in missing]
    return SweepPlan(cells, to_run, manifest.name, others)


def _place_cells(
    command: CheckedCommand, args: Namespace, conf_dir: Path, sweep_folder: Path, manifest: Manifest
) -> tuple[list[PlannedCell], list[Path]]:
    """The command's cells where the sweep has them, new ones after its last, and the folders of its other cells.

    Raises:
        ConfigError: a new cell would lie in the folder of another.
    """
    known = {cell.index: cell for cell in manifest.cells}
    jobs, indices = command.jobs, [job.index for job in command.jobs]
    placed = find_indices(manifest, [job.cell_hash for job in jobs])
    if placed != indices:  # a job's number may be in its settings
        jobs = check_command(args, conf_dir, placed).jobs
    new = [str(job.subdir) for job in jobs if job.index not in known]
    refuse_shared_folders([*(cell.folder for cell in manifest.cells), *new])
    others = [sweep_folder / cell.folder for cell in manifest.cells if cell.index not in placed]
    cells = _plan_cells(jobs, sweep_folder, manifest.name, len(placed) + len(others))
    return [
        replace(item, cell=replace(item.cell, folder=sweep_folder / known[item.cell.index].folder))
        if item.cell.index in known
        else item
        for item in cells
    ], others


def _plan_cells(
    jobs: Sequence[CheckedJob], sweep_folder: Path, name: str, num_cells: int
) -> list[PlannedCell]:
    return [
        PlannedCell(
            Cell(
                job.index,
                sweep_folder / str(job.subdir),
                tuple(job.own_overrides),
                job.command,
                job.config,
                SweepInfo(job.config.tracking.group or name, num_cells, job.index),
            ),
            job.overrides,
        )
        for job in jobs
    ]


def _note_resumption(
    manifest: Manifest, cells: Sequence[PlannedCell], sweep_folder: Path, current: Provenance
) -> None:
    write_manifest(
        sweep_folder, extend_manifest(manifest, [item.cell for item in cells], sweep_folder, current)
    )
