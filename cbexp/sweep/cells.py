"""A cell of a sweep: what it runs, where, and the hash that identifies it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from cbexp.cell_settings import SETTINGS_OUTSIDE_A_CELL
from cbexp.config import ExperimentConfig, SweepInfo, from_plain_dict, to_plain_dict
from cbexp.errors import ResultsError
from cbexp.files import replace_text

CELL, CONFIG, LOG = "cell.json", "config.yaml", "log.txt"
HASH_LENGTH = 16


@dataclass(frozen=True)
class Cell:
    """One configuration of a sweep. `command` runs it alone. `overrides` lack the sweep's own settings."""

    index: int
    folder: Path
    overrides: tuple[str, ...]
    command: str
    config: ExperimentConfig
    sweep: SweepInfo | None

    @property
    def cell_hash(self) -> str:
        """Identity of the cell: equal for configurations that run the same and keep the same records."""
        return hash_config(self.config)


def hash_config(config: ExperimentConfig) -> str:
    """Return the hash of the resolved settings without `SETTINGS_OUTSIDE_A_CELL`."""
    settings = {
        key: value for key, value in to_plain_dict(config).items() if key not in SETTINGS_OUTSIDE_A_CELL
    }
    text = json.dumps(_with_text_keys(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def write_cell(cell: Cell) -> None:
    """Write cell.json, for people and reports, and config.yaml, from which the cell's process starts.

    Raises:
        ResultsError: they cannot be written.
    """
    description = {
        "index": cell.index,
        "cell_hash": cell.cell_hash,
        "overrides": list(cell.overrides),
        "command": cell.command,
        "group": cell.sweep.group if cell.sweep else None,
        "num_cells": cell.sweep.num_jobs if cell.sweep else 1,
    }
    # YAML, because JSON would turn the numbers that a mapping may have as keys into text.
    settings = yaml.safe_dump(to_plain_dict(cell.config), sort_keys=False, allow_unicode=True)
    try:
        cell.folder.mkdir(parents=True, exist_ok=True)
        replace_text(cell.folder / CELL, json.dumps(description, indent=2) + "\n")
        replace_text(cell.folder / CONFIG, settings)
    except OSError as error:
        raise ResultsError(f"cannot write to {cell.folder}: {error.strerror}.") from error


def read_cell(folder: Path) -> Cell:
    """Return the cell that `write_cell` left in `folder`."""
    description = json.loads((folder / CELL).read_text(encoding="utf-8"))
    config = from_plain_dict(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")))
    sweep = SweepInfo(description["group"], description["num_cells"], description["index"])
    return Cell(
        description["index"],
        folder,
        tuple(description["overrides"]),
        description["command"],
        config,
        sweep if description["group"] is not None else None,
    )


def _with_text_keys(value: Any) -> Any:
    """The value with all keys of mappings as text, so that they can be sorted."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value
