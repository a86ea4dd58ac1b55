"""The chart of decode throughput against batch and context, with the memory roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbexp.report.charts import Chart, Figure, Shown, build_chart, hover, log_scale, value_axis
from cbexp.report.decode_points import DecodePoint
from cbexp.report.point_labels import label_points, place_on
from cbexp.report.roofline_curves import Curve, curves_over_batch, curves_over_context

HEIGHT_PX = 400
LOG_FROM = 12.0  # rates further apart than this get a logarithmic axis
WITH_CEILING = (
    "The line is the memory roofline: batch times measured bandwidth / bytes of a step (weights once, keys and values "
    "of every row, those that a group shares once)."
)
WITHOUT_CEILING = "No roofline: memory bandwidth is measured on GPUs only."

Points = Sequence[Shown[DecodePoint]]


@dataclass(frozen=True)
class Panel:
    """One of the two panels. `xs` has the place of each point on `axis`."""

    axis: str
    points: Points
    xs: Sequence[float]
    find_curves: Callable[[Sequence[DecodePoint], float, float], list[Curve]]

    @property
    def span(self) -> tuple[float, float]:
        """The range of the axis: half the least place to twice the largest."""
        return (min(self.xs) / 2, max(self.xs) * 2) if self.xs else (1.0, 2.0)


def build_roofline_chart(points: Points, has_winner: bool) -> Chart:
    """Two panels of points below their rooflines. Without a measured bandwidth there are only points.

    With `has_winner`, the point with number 1 stands out.
    """
    with_context = [shown for shown in points if shown.value.context is not None]
    panels = [
        Panel("x", points, [shown.value.batch for shown in points], curves_over_batch),
        Panel(
            "x2", with_context, [shown.value.context or 1.0 for shown in with_context], curves_over_context
        ),
    ]
    rates = value_axis("output tokens/s while decoding", **_rate_scale(points))
    axes = [
        _span_axis("requests in a decode step (mean)", panels[0], [0, 0.485]),
        _span_axis("tokens of context at a decode step (mean)", panels[1], [0.515, 1]),
    ]
    data = [
        trace
        for panel, axis in zip(panels, axes, strict=True)
        for trace in [*_curves(panel), _dots(panel, has_winner, _places(panel, axis, rates))]
    ]
    layout = {
        "grid": {"rows": 1, "columns": 2, "subplots": [["xy", "x2y"]]},
        "xaxis": axes[0],
        "xaxis2": axes[1],
        "yaxis": rates,
        "showlegend": False,
    }
    has_ceiling = any(shown.value.ceiling for shown in points)
    caption = "Decode steps alone, prompts not counted. Numbers are the table's; points close together share a text. "
    caption += WITH_CEILING if has_ceiling else WITHOUT_CEILING
    return build_chart("roofline", "Throughput against batch and context", caption, data, layout, HEIGHT_PX)


def _places(panel: Panel, axis: Figure, rates: Figure) -> list[tuple[float, float]]:
    """The points' positions in shares of the panel."""
    return [
        (place_on(axis, x), place_on(rates, shown.value.tokens_per_s))
        for shown, x in zip(panel.points, panel.xs, strict=True)
    ]


def _dots(panel: Panel, has_winner: bool, places: Sequence[tuple[float, float]]) -> Figure:
    labels = {label.index: label for label in label_points([shown.number for shown in panel.points], places)}
    shown_labels = [labels.get(index) for index in range(len(places))]
    colors = ["--fastest" if has_winner and shown.number == 1 else "--dot" for shown in panel.points]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": list(panel.xs),
        "y": [shown.value.tokens_per_s for shown in panel.points],
        "text": ["" if label is None else f"  {label.text}  " for label in shown_labels],
        "textposition": [
            "middle left" if label and label.is_left else "middle right" for label in shown_labels
        ],
        "textfont": {"size": 12, "color": "--muted"},
        "marker": {"size": 11, "color": colors, "line": {"width": 1.5, "color": "--card"}},
        "hovertext": [_hover(shown) for shown in panel.points],
        "hoverinfo": "text",
        "xaxis": panel.axis,
        "yaxis": "y",
    }


def _hover(shown: Shown[DecodePoint]) -> str:
    point = shown.value
    lines = {"decoding": f"{point.tokens_per_s:,.0f} output tokens/s", "batch": f"{point.batch:.3g}"}
    if point.context is not None:
        lines["context"] = f"{point.context:,.0f} tokens"
    if point.ceiling_tokens_per_s is not None:
        lines["memory allows"] = f"{point.ceiling_tokens_per_s:,.0f} output tokens/s"
        lines["reached"] = f"{point.tokens_per_s / point.ceiling_tokens_per_s:.1%}"
    return hover(f"#{shown.number} {shown.label}", lines)


def _curves(panel: Panel) -> list[Figure]:
    curves = panel.find_curves([shown.value for shown in panel.points], *panel.span)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": curve.xs,
            "y": curve.tokens_per_s,
            "line": {"color": "--roof", "width": 2, "dash": "dot"},
            "hovertext": f"memory roofline, {curve.name}",
            "hoverinfo": "text+y",
            "xaxis": panel.axis,
            "yaxis": "y",
        }
        for curve in curves
    ]


def _rate_scale(points: Points) -> Figure:
    rates = [shown.value.tokens_per_s for shown in points]
    ceilings = [ceiling for shown in points if (ceiling := shown.value.ceiling_tokens_per_s) is not None]
    low, high = min(rates), max([*rates, *ceilings])
    return log_scale(low / 2, high * 2) if high / low > LOG_FROM else {"range": [0, high * 1.15]}


def _span_axis(title: str, panel: Panel, domain: Sequence[float]) -> Figure:
    """A logarithmic axis with ticks at the powers of two."""
    low, high = panel.span
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    scale = log_scale(low, high) | {"tickvals": [2.0**power for power in powers]}
    return value_axis(title, **scale, domain=list(domain))
