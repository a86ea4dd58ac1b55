"""A bootstrap confidence interval for the ratio of two runs' median throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbexp.report.run import TimedRound

NUM_RESAMPLES = 10_000
SEED = 0
CONFIDENCE = 0.95
MIN_ROUNDS = 3
RULE = (
    f"the interval is the {CONFIDENCE:.0%} percentile bootstrap of the ratio of the two runs' throughput of the "
    f"median round: {NUM_RESAMPLES:,} resamples of each run's timed rounds, with replacement, seed {SEED}; with "
    f"fewer than {MIN_ROUNDS} timed rounds on either side, or a round without output, there is none"
)


@dataclass(frozen=True)
class Interval:
    """The ends of a confidence interval."""

    low: float
    high: float


def ratio_interval(rounds: Sequence[TimedRound], base_rounds: Sequence[TimedRound]) -> Interval | None:
    """The percentile bootstrap interval of (throughput of a run) / (throughput of its baseline), by `RULE`.

    None with too few rounds, or where a round gave no output.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Three rounds give a wide
    interval, not a false alarm: the least of them is the median of 7 in 27 resamples, so the interval spans all pairs
    of rounds. The rounds of a run share one process. Differences between processes (clocks, placement of memory) are
    therefore not in the interval, and `compare` adds a threshold for them.
    """
    if min(len(rounds), len(base_rounds)) < MIN_ROUNDS:
        return None
    if any(timed.num_output_tokens <= 0 for timed in (*rounds, *base_rounds)):
        return None
    generator = np.random.default_rng(SEED)
    ratios = _resampled_rates(rounds, generator) / _resampled_rates(base_rounds, generator)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(float(low), float(high))


def _resampled_rates(rounds: Sequence[TimedRound], generator: np.random.Generator) -> np.ndarray:
    """Throughput of each resample's median round, [resamples], by the rule of `metrics.spread_of_rate`."""
    ordered = np.array(sorted((timed.wall_s, timed.num_output_tokens) for timed in rounds))
    ranks = np.sort(generator.integers(len(rounds), size=(NUM_RESAMPLES, len(rounds))), axis=1)
    middle = ordered[ranks[:, (len(rounds) - 1) // 2 : len(rounds) // 2 + 1]].sum(axis=1)
    return np.asarray(middle[:, 1] / middle[:, 0])
