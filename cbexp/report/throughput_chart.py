"""The bar chart of throughput, with the range over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbexp.report.charts import Chart, Figure, build_chart, hover, rows_axis, rows_height_px, value_axis
from cbexp.report.rows import Row
from cbexp.report.run import is_failure

ROOM_FOR_TEXT = 1.5
TIMES = "\N{MULTIPLICATION SIGN}"


def build_throughput_chart(
    chart_id: str, rows: Sequence[Row], short: Mapping[str, str], has_winner: bool
) -> Chart:
    """A bar for each row, labelled by `short`, which has folders as keys. With `has_winner` the first stands out.

    A run without figures has its status in place of a bar.
    """
    labels = [short[row["folder"]] for row in rows]
    longest = max((_rates(row)[2] for row in rows), default=0.0)
    layout = {
        "xaxis": value_axis(
            "output tokens per second", range=[0, longest * ROOM_FOR_TEXT or 1], rangemode="tozero"
        ),
        "yaxis": rows_axis(labels),
        "showlegend": False,
        "bargap": 0.42,
    }
    caption = "Median round; the whisker spans the slowest and the fastest timed round."
    if not has_winner:
        caption += " Each of these has a workload of its own: they are not to be compared with each other."
    data = [_bars(rows, labels, has_winner), _values(rows)]
    return build_chart(chart_id, "Throughput", caption, data, layout, rows_height_px(len(rows)))


def _bars(rows: Sequence[Row], labels: Sequence[str], has_winner: bool) -> Figure:
    rates = [_rates(row) for row in rows]
    colors = ["--fastest" if has_winner and index == 0 else "--bar" for index in range(len(rows))]
    return {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(rows))),
        "x": [middle or None for _, middle, _ in rates],
        "marker": {"color": colors, "cornerradius": 3},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - middle if middle else None for _, middle, high in rates],
            "arrayminus": [middle - low if middle else None for low, middle, _ in rates],
            "color": "--text",
            "thickness": 1.2,
            "width": 4,
        },
        "hovertext": [_hover(row, label) for row, label in zip(rows, labels, strict=True)],
        "hoverinfo": "text",
    }


def _rates(row: Row) -> tuple[float, float, float]:
    """Slowest round, median, fastest round; zeros for a run without figures."""
    middle = row["output_tokens_per_s"] or 0.0
    low, high = row["output_tokens_per_s_min"], row["output_tokens_per_s_max"]
    return (middle if low is None else low, middle, middle if high is None else high)


def _values(rows: Sequence[Row]) -> Figure:
    """The figures as text, right of the whiskers."""
    return {
        "type": "scatter",
        "mode": "text",
        "y": list(range(len(rows))),
        "x": [_rates(row)[2] for row in rows],
        "text": [_value(row) for row in rows],
        "textposition": "middle right",
        "textfont": {"color": [_text_color(row) for row in rows]},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }


def _text_color(row: Row) -> str:
    if row["output_tokens_per_s"] is not None:
        return "--text"
    return "--bad" if is_failure(row["status"]) else "--warn"


def _value(row: Row) -> str:
    if row["output_tokens_per_s"] is None:
        return f"  {row['status'].replace('_', ' ')}"
    ratio = (
        "" if row["ratio"] is None else f"  <span style='font-weight:400'>{row['ratio']:.2f}{TIMES}</span>"
    )
    return f"  <b>{row['output_tokens_per_s']:,.0f}</b>{ratio}"


def _hover(row: Row, label: str) -> str:
    low, middle, high = _rates(row)
    if not middle:
        return hover(label, {"status": row["status"]})
    lines = {"median round": f"{middle:,.0f} output tokens/s", "all rounds": f"{low:,.0f} to {high:,.0f}"}
    return hover(label, lines)
