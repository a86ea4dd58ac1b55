"""The value that a job returns to Hydra, for a search over configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbexp.config import ExperimentConfig
from cbexp.tracking import compute_objective


def find_objective(config: ExperimentConfig, summary: Mapping[str, Any] | None) -> float | None:
    """Return the objective of a completed job, as W&B has it; None without a summary that has the figures."""
    if summary is None or not isinstance(summary.get("decode_tps"), int | float):
        return None
    return compute_objective(summary, config.tracking.max_memory_gib)
