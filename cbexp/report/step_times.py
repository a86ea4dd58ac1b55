"""Percentiles of the time of decode steps, over all timed rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from cbexp.report.json_files import Reader, number
from cbexp.report.run import Run

PERCENTS = (1, 25, 50, 75, 99)


@dataclass(frozen=True)
class StepTimes:
    """Percentiles in seconds. Without steps.jsonl the quartiles are unknown and equal the median."""

    p1: float
    p25: float
    p50: float
    p75: float
    p99: float
    has_quartiles: bool


def find_step_times(run: Run) -> StepTimes | None:
    """The percentiles, from steps.jsonl or else from the rounds' own percentiles; None without either.

    The steps of a burst share its time equally, as in the rounds' figures.
    """
    if not run.is_completed:
        return None
    timed = {number(timed.record, "round_index") for timed in run.rounds}
    rows = [row for row in Reader(run.folder).read_rows("steps.jsonl") if _is_decode_step(row, timed)]
    return _from_steps(rows) if rows else _from_rounds(run)


def _is_decode_step(row: Mapping[str, Any], timed: set[float | None]) -> bool:
    num_steps, duration_s = number(row, "num_steps") or 0.0, number(row, "duration_s")
    is_counted = num_steps >= 1 and num_steps.is_integer() and duration_s is not None and duration_s >= 0
    return is_counted and row.get("kind") == "decode" and number(row, "round_index") in timed


def _from_steps(rows: Sequence[Mapping[str, Any]]) -> StepTimes:
    counts = np.array([number(row, "num_steps") for row in rows], dtype=float)
    times_s = np.array([number(row, "duration_s") for row in rows], dtype=float) / counts
    p1, p25, p50, p75, p99 = _percentiles(times_s, counts).tolist()
    return StepTimes(p1, p25, p50, p75, p99, has_quartiles=True)


def _percentiles(times_s: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`PERCENTS` of the times, each repeated `counts` times, interpolated linearly like `numpy.percentile`."""
    order = np.argsort(times_s)
    ordered_s, ends = times_s[order], np.cumsum(counts[order])
    places = np.array(PERCENTS) / 100 * (ends[-1] - 1)
    below, above = (
        ordered_s[np.searchsorted(ends, whole, side="right")] for whole in (np.floor(places), np.ceil(places))
    )
    return np.asarray(below + (places % 1) * (above - below))


def _from_rounds(run: Run) -> StepTimes | None:
    low, middle, high = (
        [
            value
            for timed in run.rounds
            if (value := number(timed.record, "steps", "decode_step_s", name)) is not None
        ]
        for name in ("min", "p50", "p99")
    )
    if not low or not middle or not high:
        return None
    p50 = median(middle)
    return StepTimes(median(low), p50, p50, p50, median(high), has_quartiles=False)
