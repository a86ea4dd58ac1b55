"""sweep.json: a sweep's cells and the code it began on, written before the first cell starts."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cbexp
from cbexp.errors import ConfigError, ResultsError
from cbexp.files import describe_failure, replace_text
from cbexp.provenance import PACKAGES, describe_source, hash_changes, version_of
from cbexp.run_status import now, read_json_object
from cbexp.sweep.cells import Cell

MANIFEST = "sweep.json"
FORMAT = 1


@dataclass(frozen=True)
class Provenance:
    """The code that a sweep runs on. `changes_hash` is of what differs from the commit; empty if nothing does."""

    commit: str | None
    is_dirty: bool | None
    changes_hash: str | None
    versions: dict[str, str | None]


@dataclass(frozen=True)
class KnownCell:
    """A cell as sweep.json lists it; `folder` is relative to the sweep's."""

    index: int
    cell_hash: str
    folder: str
    overrides: list[str]
    command: str


@dataclass(frozen=True)
class Manifest:
    """The content of sweep.json. `resumed` has the time and provenance of each resumption."""

    name: str
    created_at: str
    provenance: Provenance
    argv: list[str]
    cells: list[KnownCell]
    resumed: list[dict[str, Any]] = field(default_factory=list)


def find_provenance() -> Provenance:
    """Return what code this process runs on."""
    root = Path(cbexp.__file__).parents[1]
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    return Provenance(**describe_source(root), changes_hash=hash_changes(root), versions=versions)


def build_manifest(
    name: str, argv: Sequence[str], cells: Sequence[Cell], sweep_folder: Path, provenance: Provenance
) -> Manifest:
    """Return the manifest of a sweep that begins now."""
    return Manifest(
        name, now(), provenance, list(argv), [describe_cell(cell, sweep_folder) for cell in cells]
    )


def describe_cell(cell: Cell, sweep_folder: Path) -> KnownCell:
    """Return the cell's entry in sweep.json."""
    folder = str(cell.folder.relative_to(sweep_folder))
    return KnownCell(cell.index, cell.cell_hash, folder, list(cell.overrides), cell.command)


def write_manifest(sweep_folder: Path, manifest: Manifest) -> None:
    """Write sweep.json as a whole.

    Raises:
        ResultsError: it cannot be written.
    """
    values = asdict(manifest)
    values = {
        "format": FORMAT,
        **{k: v for k, v in values.items() if k != "provenance"},
        **values["provenance"],
    }
    path = sweep_folder / MANIFEST
    try:
        replace_text(path, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ResultsError(describe_failure(path, error)) from error


def read_manifest(sweep_folder: Path) -> Manifest:
    """Return the content of sweep.json.

    Raises:
        ConfigError: it is damaged, or of another format.
    """
    values = read_json_object(sweep_folder / MANIFEST)
    if values is None or values.get("format") != FORMAT:
        raise ConfigError(
            f"resume={sweep_folder}: {MANIFEST} is damaged, or of another version of cbexp, so that nobody knows its "
            f"cells. Begin a new sweep; what this one has is shown by python -m cbexp.report {sweep_folder}."
        )
    try:
        provenance = Provenance(
            **{key: values[key] for key in ("commit", "is_dirty", "changes_hash", "versions")}
        )
        cells = [KnownCell(**cell) for cell in values["cells"]]
        own = {key: values[key] for key in ("name", "created_at", "resumed")} | {"argv": list(values["argv"])}
    except (KeyError, TypeError) as error:
        raise ConfigError(f"resume={sweep_folder}: {MANIFEST} is damaged ({error}).") from error
    manifest = Manifest(provenance=provenance, cells=cells, **own)
    if not _is_well_formed(manifest):
        raise ConfigError(
            f"resume={sweep_folder}: {MANIFEST} is damaged: values of another type than cbexp writes."
        )
    return manifest


def _is_well_formed(manifest: Manifest) -> bool:
    """Whether the values that a resumption relies on have the right types."""
    provenance = manifest.provenance
    texts = [
        manifest.name,
        *manifest.argv,
        *(text for cell in manifest.cells for text in (cell.cell_hash, cell.folder)),
    ]
    return (
        isinstance(manifest.resumed, list)
        and isinstance(provenance.versions, dict)
        and isinstance(provenance.commit, str | None)
        and all(isinstance(cell.index, int) for cell in manifest.cells)
        and all(isinstance(text, str) for text in texts)
    )
