"""The memory roofline as curves over batch and over context. Points with nearly the same roofline share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbexp.report.decode_points import Ceiling, DecodePoint

NUM_POINTS = 65
CLOSE = 0.02  # points share a curve when all that decides it differs by less


@dataclass(frozen=True)
class Curve:
    """The roofline in output tokens per second at each of `xs` (batches or contexts)."""

    name: str
    xs: list[float]
    tokens_per_s: list[float]


def curves_over_batch(points: Sequence[DecodePoint], low: float, high: float) -> list[Curve]:
    """A curve for each context among the points, over batches from `low` to `high`."""
    batches = _places(low, high)
    return [
        Curve(f"context {context:,.0f}", batches, [ceiling.tokens_per_s(batch, context) for batch in batches])
        for ceiling, context in _distinct([(point.ceiling, point.context) for point in points])
    ]


def curves_over_context(points: Sequence[DecodePoint], low: float, high: float) -> list[Curve]:
    """A curve for each batch among the points, over contexts from `low` to `high`."""
    contexts = _places(low, high)
    return [
        Curve(f"batch {batch:.3g}", contexts, [ceiling.tokens_per_s(batch, context) for context in contexts])
        for ceiling, batch in _distinct([(point.ceiling, point.batch) for point in points])
    ]


def _places(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (index / (NUM_POINTS - 1)) for index in range(NUM_POINTS)]


def _distinct(found: Sequence[tuple[Ceiling | None, float | None]]) -> list[tuple[Ceiling, float]]:
    kept: list[tuple[Ceiling, float]] = []
    for ceiling, at in found:
        if ceiling is None or at is None:
            continue
        if not any(_is_close((ceiling, at), other) for other in kept):
            kept.append((ceiling, at))
    return kept


def _is_close(one: tuple[Ceiling, float], other: tuple[Ceiling, float]) -> bool:
    pairs = zip(_figures(*one), _figures(*other), strict=True)
    return all(abs(mine - theirs) <= CLOSE * max(mine, theirs) for mine, theirs in pairs)


def _figures(ceiling: Ceiling, at: float) -> tuple[float, ...]:
    return (at, ceiling.bandwidth_bytes_per_s, ceiling.weight_bytes, ceiling.kv_bytes_per_token)
