"""One W&B run for a whole sweep: its cells as a table and as bars."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbexp.config import TrackingConfig
from cbexp.errors import ConfigError
from cbexp.tracking.identity import find_sweep_run_id
from cbexp.tracking.start import start_run
from cbexp.tracking.tracker import Tracker

GOOD_ENDS = ("completed", "not_applicable")
CELL, STATUS, THROUGHPUT = "label", "status", "output_tokens_per_s"


def log_sweep(
    config: TrackingConfig, name: str, sweep_folder: Path, rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Log a finished sweep as one W&B run and return what went wrong. A resumed sweep continues its run.

    There is a row for each cell, with `label`, `status`, `output_tokens_per_s` (or None), and any other keys. The run
    counts as failed if a cell does. If it cannot go online it is kept offline. Nothing is raised: the sweep is over,
    and its records are on disk.
    """
    if config.mode == "disabled":
        return []
    try:
        tracker = _start_online_or_offline(config, name, sweep_folder, len(rows))
    except ConfigError as error:
        return [str(error)]
    statuses = Counter(str(row[STATUS]) for row in rows)
    tracker.log_values(lambda: _build_values(rows), {"num_cells": len(rows), "statuses": dict(statuses)})
    tracker.finish(exit_code=0 if set(statuses) <= set(GOOD_ENDS) else 1)
    return tracker.warnings


def _start_online_or_offline(
    config: TrackingConfig, name: str, sweep_folder: Path, num_cells: int
) -> Tracker:
    """Start the sweep's run, offline if it cannot go online. A warning says why, and how to upload it."""
    try:
        return _start(config, name, sweep_folder, num_cells)
    except ConfigError as error:
        if config.mode != "online":
            raise
        tracker = _start(replace(config, mode="offline"), name, sweep_folder, num_cells)
        tracker.warn_of_fallback(str(error).rstrip("."))
        return tracker


def _start(config: TrackingConfig, name: str, sweep_folder: Path, num_cells: int) -> Tracker:
    run_id = find_sweep_run_id(sweep_folder)
    return start_run(config, name, config.group or name, run_id, {"num_cells": num_cells}, sweep_folder)


def _build_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of all cells, and a bar chart of those with a throughput."""
    import wandb

    names, data = _tabulate(rows)
    measured = [row for row in rows if row[THROUGHPUT] is not None]
    bars = wandb.Table(columns=[CELL, THROUGHPUT], data=[[row[CELL], row[THROUGHPUT]] for row in measured])
    return {
        "cells": wandb.Table(columns=names, data=data),
        "throughput": wandb.plot.bar(bars, CELL, THROUGHPUT, title="Output tokens per second"),
    }


def _tabulate(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str | int], list[list[Any]]]:
    """Column names in order of first appearance, and the rows. wandb wants one type in each column."""
    names: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_unify([row.get(str(name)) for row in rows]) for name in names]
    return names, [list(values) for values in zip(*columns, strict=True)]


def _unify(values: Sequence[Any]) -> list[Any]:
    """A column's values as they are if all are numbers, truth values or text; otherwise as JSON text."""
    kinds = {_kind(value) for value in values if value is not None}
    if len(kinds) <= 1 and None not in kinds:
        return list(values)
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]


def _kind(value: Any) -> type | None:
    if isinstance(value, bool | str):
        return type(value)
    return float if isinstance(value, int | float) else None
