"""The W&B run of a job: a new one, that of the cell's earlier attempt, or the one of a `wandb agent`."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from cbexp.config import SweepInfo
from cbexp.errors import ConfigError
from cbexp.run_status import read_json_object

RUN_ID_LENGTH = 16
CELL_FILE, SWEEP_FILE = "cell.json", "sweep.json"


def is_under_agent() -> bool:
    """Whether `wandb agent` started this process. The agent then sets its run, project and entity."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def refuse_sweep_under_agent(sweep: SweepInfo | None) -> None:
    """Raise `ConfigError` for a multirun under a W&B agent: all cells would go into the agent's one run."""
    if sweep is not None and is_under_agent():
        raise ConfigError(
            "a W&B agent runs one configuration at a time, and this is a multirun: take -m, and an experiment that "
            "sweeps, out of the sweep's command."
        )


def find_cell_run_id(run_dir: Path) -> str | None:
    """Return the run id of the cell in `run_dir`, the same whenever its sweep is resumed; None outside of a sweep."""
    cell = read_json_object(run_dir / CELL_FILE)
    sweep_ids = map(find_sweep_run_id, run_dir.absolute().parents)  # hydra.sweep.subdir may nest
    sweep_id = next((found for found in sweep_ids if found is not None), None)
    if sweep_id is None or cell is None:
        return None
    return _digest(sweep_id, cell.get("index"), cell.get("cell_hash"))


def find_sweep_run_id(sweep_folder: Path) -> str | None:
    """Return the run id of the sweep in `sweep_folder`, the same whenever it is resumed; None when it is no sweep's."""
    sweep = read_json_object(sweep_folder / SWEEP_FILE)
    return None if sweep is None else _digest(sweep_folder.name, sweep.get("name"), sweep.get("created_at"))


def make_run_id() -> str:
    """Return a random run id."""
    return secrets.token_hex(RUN_ID_LENGTH // 2)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:RUN_ID_LENGTH]
