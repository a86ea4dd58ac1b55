"""The number that a search over configurations maximises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OBJECTIVE = "objective"  # its name in W&B, the same for every search
REJECTED = 0.0  # of a run that failed or needs too much memory


def compute_objective(summary: Mapping[str, Any], max_memory_gib: float | None) -> float:
    """Return output tokens per second, or 0 when the run's peak memory was above `max_memory_gib`.

    The peak is what the process held on its device (`peak_reserved_gib`), on a CPU its resident memory.
    """
    if max_memory_gib is not None:
        on_device = summary["peak_reserved_gib"]
        peak_gib = summary["peak_host_gib"] if on_device is None else on_device
        if peak_gib is None or peak_gib > max_memory_gib:
            return REJECTED
    return float(summary["decode_tps"])
