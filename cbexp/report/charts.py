"""Parts of Plotly figures that the page's charts share. Colours are names from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cbexp.report.ticks import cut_labels

Figure = dict[str, Any]
T = TypeVar("T")

TICK_COLUMNS, LONG_TICK_COLUMNS = 30, 56
MAX_HIGH_ROWS = 12
HIGH_ROW_PX, LOW_ROW_PX, FRAME_PX = 40, 25, 72


@dataclass(frozen=True)
class Shown(Generic[T]):
    """What a chart shows of one run, with the run's number in the table and its label."""

    number: int
    label: str
    value: T


@dataclass(frozen=True)
class Chart:
    """A Plotly figure with its title, caption and height."""

    chart_id: str
    title: str
    caption: str
    figure: Figure
    height_px: int


def build_chart(
    chart_id: str, title: str, caption: str, data: Sequence[Figure], layout: Figure, height_px: int
) -> Chart:
    """A chart with narrow margins and without dragging."""
    base: Figure = {
        "margin": {"l": 8, "r": 16, "t": 8, "b": 8},
        "dragmode": False,
        "hovermode": "closest",
    }
    return Chart(chart_id, title, caption, {"data": list(data), "layout": base | layout}, height_px)


def escape(text: str) -> str:
    """Escape text for Plotly, which reads tags as markup."""
    return html.escape(text, quote=False)


def rows_axis(labels: Sequence[str]) -> Figure:
    """A vertical axis with a row for each label, the first on top. Labels take one line when there are many."""
    columns, num_lines = (LONG_TICK_COLUMNS, 1) if len(labels) > MAX_HIGH_ROWS else (TICK_COLUMNS, 2)
    return {
        "tickmode": "array",
        "tickvals": list(range(len(labels))),
        "ticktext": ["<br>".join(map(escape, lines)) for lines in cut_labels(labels, columns, num_lines)],
        "range": [len(labels) - 0.5, -0.5],
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "ticks": "",
        "tickfont": {"size": 12},
    }


def value_axis(title: str, **more: Any) -> Figure:
    """An axis of numbers."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 13}},
        "automargin": True,
        "zeroline": False,
        "fixedrange": True,
    } | more


def log_scale(low: float, high: float) -> Figure:
    """A logarithmic axis from `low` to `high`, both above zero, with ticks at 1, 2 and 5 times the powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": [value for value in ticks if low <= value <= high],
        "tickformat": ",~r",
    }


def rows_height_px(num_rows: int) -> int:
    """The height of a chart with `num_rows` rows and an axis below them."""
    return (LOW_ROW_PX if num_rows > MAX_HIGH_ROWS else HIGH_ROW_PX) * num_rows + FRAME_PX


def hover(title: str, lines: Mapping[str, str]) -> str:
    """The text of a hover box: a title, then a line for each name and value."""
    body = "<br>".join(f"{escape(name)}: <b>{escape(value)}</b>" for name, value in lines.items())
    return f"<b>{escape(title)}</b><br>{body}"
