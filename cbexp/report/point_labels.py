"""Numbers beside the points of a chart. Points that are close together share one text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cbexp.report.charts import Figure
from cbexp.report.rows import format_row_numbers

Place = tuple[float, float]

# Shares of a panel of about 480 x 300 pixels, texts of 12 pixels, points of 11.
SIGN_WIDTH, TEXT_HEIGHT = 0.0145, 0.055
GAP, POINT_WIDTH, POINT_HEIGHT = 0.03, 0.024, 0.04
MAX_SPANS = 2  # a longer list of numbers would cover the panel


@dataclass(frozen=True)
class PointLabel:
    """The text of the points `members`. It stands beside the point `index`, which lies at `place`."""

    text: str
    index: int
    is_left: bool
    members: Sequence[int]
    place: Place

    @property
    def span(self) -> tuple[float, float]:
        """Where the text begins and ends horizontally, in shares of the panel."""
        x, width = self.place[0], len(self.text) * SIGN_WIDTH
        return (x - GAP - width, x - GAP) if self.is_left else (x + GAP, x + GAP + width)


def place_on(axis: Figure, value: float) -> float:
    """The position of a value on an axis: 0 at the start of its range, 1 at the end."""
    low, high = axis["range"]
    return float(((math.log10(value) if axis.get("type") == "log" else value) - low) / (high - low))


def label_points(numbers: Sequence[int], places: Sequence[Place]) -> list[PointLabel]:
    """Texts that together name all points. None covers another text or another text's points."""
    labels = [_label([index], numbers, places) for index in range(len(places))]
    while (touching := next(_find_touching(labels, places), None)) is not None:
        one, other = touching
        labels = [label for label in labels if label not in (one, other)]
        labels.append(_label([*one.members, *other.members], numbers, places))
    return labels


def _label(members: Sequence[int], numbers: Sequence[int], places: Sequence[Place]) -> PointLabel:
    """A text right of the rightmost point, or left of the leftmost one if it would leave the panel."""
    text = format_row_numbers([numbers[index] for index in members])
    if text.count(",") >= MAX_SPANS:
        text = f"#{min(numbers[index] for index in members)} and {len(members) - 1} more"
    ordered = sorted(members, key=places.__getitem__)
    is_left = places[ordered[-1]][0] + GAP + len(text) * SIGN_WIDTH > 1
    index = ordered[0] if is_left else ordered[-1]
    return PointLabel(text, index, is_left, members, places[index])


def _find_touching(
    labels: Sequence[PointLabel], places: Sequence[Place]
) -> Iterator[tuple[PointLabel, PointLabel]]:
    """Pairs of labels of which one's text covers the other's text or points."""
    for one in labels:
        for other in labels:
            if other is not one and (_covers_text(one, other) or _covers_point(one, other, places)):
                yield one, other


def _covers_text(one: PointLabel, other: PointLabel) -> bool:
    is_beside = one.span[1] < other.span[0] or other.span[1] < one.span[0]
    return not is_beside and abs(one.place[1] - other.place[1]) < TEXT_HEIGHT


def _covers_point(one: PointLabel, other: PointLabel, places: Sequence[Place]) -> bool:
    low, high = one.span[0] - POINT_WIDTH / 2, one.span[1] + POINT_WIDTH / 2
    points = [places[index] for index in other.members]
    return any(low < x < high and abs(y - one.place[1]) < (TEXT_HEIGHT + POINT_HEIGHT) / 2 for x, y in points)
