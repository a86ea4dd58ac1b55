"""Percentiles, medians and spreads, each with its rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

__all__ = ["Quantiles", "Spread", "median", "percentile", "quantiles", "spread", "spread_of_rate"]


@dataclass(frozen=True)
class Quantiles:
    """How a quantity is distributed over requests or steps, in the unit of the field that holds it."""

    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Spread:
    """A quantity over rounds. `relative_half_range` = (max - min) / 2 / median, 0 when all are equal."""

    median: float
    min: float
    max: float
    relative_half_range: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly between the two nearest ranks.

    The rank is percent / 100 * (n - 1), counted from 0: numpy's default (Hyndman and Fan, type 7).

    Raises:
        ValueError: `values` is empty or `percent` is outside [0, 100].
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent={percent} is outside [0, 100]")
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Mean, extremes and percentiles of the values; None of no values."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return Quantiles(fmean(values), min(values), p50, p90, p99, max(values))


def spread(values: Sequence[float]) -> Spread:
    """Median (of an even number: the mean of the middle two) and range of at least one value."""
    return _spread_around(median(values), values)


def spread_of_rate(amounts: Sequence[float], walls_s: Sequence[float]) -> Spread:
    """Spread of amount / seconds over rounds; the median is the rate of the median round.

    The median round is the middle one by seconds. Of an even number of rounds it is the middle two taken together:
    the sum of their amounts over the sum of their seconds. So the rate is always (amount of the median round) /
    (median seconds).
    """
    rates = [amount / wall for amount, wall in zip(amounts, walls_s, strict=True)]
    middle = median_indices(walls_s)
    rate = sum(amounts[i] for i in middle) / sum(walls_s[i] for i in middle)
    return _spread_around(rate, rates)


def median_indices(values: Sequence[float]) -> list[int]:
    """Indices of the middle value, or of the middle two of an even number of values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return order[(len(order) - 1) // 2 : len(order) // 2 + 1]


def _spread_around(middle: float, values: Sequence[float]) -> Spread:
    low, high = min(values), max(values)
    half_range = (high - low) / 2
    return Spread(middle, low, high, half_range / middle if half_range else 0.0)
