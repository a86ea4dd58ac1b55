"""The charts of decode step times, and of where a job's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbexp.report.charts import (
    Chart,
    Figure,
    Shown,
    build_chart,
    hover,
    log_scale,
    rows_axis,
    rows_height_px,
    value_axis,
)
from cbexp.report.step_times import StepTimes
from cbexp.report.time_use import MEANINGS, PHASES

LOG_FROM = 20.0  # times further apart than this would hide the short ones on a linear axis
LEGEND_PX = 30


def build_step_time_chart(times: Sequence[Shown[StepTimes]]) -> Chart:
    """A box plot for each run, with whiskers at the 1st and 99th percentile."""
    labels = [shown.label for shown in times]
    steps = [shown.value for shown in times]
    box = {
        "type": "box",
        "orientation": "h",
        "y": list(range(len(times))),
        "lowerfence": [_ms(step.p1) for step in steps],
        "q1": [_ms(step.p25) for step in steps],
        "median": [_ms(step.p50) for step in steps],
        "q3": [_ms(step.p75) for step in steps],
        "upperfence": [_ms(step.p99) for step in steps],
        "line": {"color": "--dot", "width": 1.6},
        "fillcolor": "--box",
        "hoverinfo": "skip",
        "width": 0.5,
    }
    layout = {
        "xaxis": value_axis("milliseconds of a decode step", **_scale(steps)),
        "yaxis": rows_axis(labels),
        "showlegend": False,
    }
    caption = "Median and quartiles of all decode steps in timed rounds; whiskers end at the 1st and 99th percentile."
    if not all(step.has_quartiles for step in steps):
        caption += " Where there is no steps.jsonl, only the median and the whiskers are known."
    data = [box, _medians(times)]
    return build_chart("step_times", "Decode step time", caption, data, layout, rows_height_px(len(times)))


def build_time_use_chart(seconds: Sequence[Shown[dict[str, float]]]) -> Chart:
    """Two panels of stacked bars: seconds of the whole job, and shares of its timed rounds."""
    labels = [shown.label for shown in seconds]
    in_rounds = ("prefill", "mixed", "decode", "idle")
    data: list[Figure] = []
    for phase in PHASES:
        spent = [shown.value.get(phase, 0.0) for shown in seconds]
        if any(spent):
            data.append(_stack(phase, labels, spent, "s", "x"))
    for phase in in_rounds:
        shares = [100 * _share(shown.value, phase, in_rounds) for shown in seconds]
        if any(shares):
            data.append(_stack(phase, labels, shares, "%", "x2") | {"showlegend": False})
    layout = {
        "barmode": "stack",
        "bargap": 0.42,
        "grid": {"rows": 1, "columns": 2, "subplots": [["xy", "x2y"]]},
        "xaxis": value_axis("seconds of the whole job", domain=[0, 0.485]),
        "xaxis2": value_axis("% of the timed rounds", domain=[0.515, 1], range=[0, 100]),
        "yaxis": rows_axis(labels),
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"l": 8, "r": 16, "t": 8 + LEGEND_PX, "b": 8},
    }
    caption = (
        "Left: the whole job, loading and compiling included; right: the timed rounds, which alone count. "
        f"{_describe_phases(seconds)}."
    )
    height_px = rows_height_px(len(seconds)) + LEGEND_PX
    return build_chart("time_use", "Where the time goes", caption, data, layout, height_px)


def _describe_phases(seconds: Sequence[Shown[dict[str, float]]]) -> str:
    """The meanings of the phases that any run spent time in."""
    known = [phase for phase in PHASES if any(shown.value.get(phase) for shown in seconds)]
    return "; ".join(f"{phase}: {MEANINGS[phase]}" for phase in known)


def _stack(phase: str, labels: Sequence[str], values: Sequence[float], unit: str, xaxis: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": phase,
        "legendgroup": phase,
        "y": list(range(len(labels))),
        "x": list(values),
        "marker": {"color": f"--phase-{phase}", "line": {"width": 0}},
        "hovertext": [
            hover(label, {phase: f"{value:,.3g} {unit}", "that is": MEANINGS[phase]})
            for label, value in zip(labels, values, strict=True)
        ],
        "hoverinfo": "text",
        "xaxis": xaxis,
        "yaxis": "y",
    }


def _share(phases: Mapping[str, float], phase: str, of: Sequence[str]) -> float:
    total = sum(phases.get(name, 0.0) for name in of)
    return phases.get(phase, 0.0) / total if total else 0.0


def _medians(times: Sequence[Shown[StepTimes]]) -> Figure:
    """Dots on the medians; they carry the hover text."""
    return {
        "type": "scatter",
        "mode": "markers",
        "y": list(range(len(times))),
        "x": [_ms(shown.value.p50) for shown in times],
        "marker": {"size": 7, "color": "--fastest"},
        "hovertext": [hover(shown.label, _percentiles(shown.value)) for shown in times],
        "hoverinfo": "text",
    }


def _percentiles(step: StepTimes) -> dict[str, str]:
    known = {"p1": step.p1, "p50": step.p50, "p99": step.p99}
    if step.has_quartiles:
        known = {"p1": step.p1, "p25": step.p25, "p50": step.p50, "p75": step.p75, "p99": step.p99}
    return {name: f"{_ms(value):.3g} ms" for name, value in known.items()}


def _scale(times: Sequence[StepTimes]) -> Figure:
    low, high = _ms(min(step.p1 for step in times)), _ms(max(step.p99 for step in times))
    return log_scale(low * 0.8, high * 1.25) if low > 0 and high / low > LOG_FROM else {"rangemode": "tozero"}


def _ms(seconds: float) -> float:
    return seconds * 1e3
