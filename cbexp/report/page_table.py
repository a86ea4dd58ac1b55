"""The columns of figures in the page's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbexp.report.bootstrap import CONFIDENCE
from cbexp.report.peak_memory import find_peak_memory
from cbexp.report.rows import Row

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Cell:
    """What a column shows of a run: `text` and a smaller `remark`. The table sorts by `value`."""

    value: float | None
    text: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Column:
    """A column: its heading, what the heading means, and the cell of a row."""

    heading: str
    meaning: str
    cell: Callable[[Row], Cell]
    is_main: bool = False


def columns_for(rows: Sequence[Row]) -> list[Column]:
    """The columns that show something in any row, and throughput always."""
    return [
        column for column in COLUMNS if column.is_main or any(column.cell(row) != Cell(None) for row in rows)
    ]


def _figure(name: str, form: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        value = row[name]
        return Cell(None) if value is None else Cell(value, form.format(value))

    return cell


def _ratio(row: Row) -> Cell:
    if row["ratio"] is None:
        return Cell(None, row["no_ratio"] or "")
    has_interval = row["ratio_low"] is not None and not row["is_baseline"]
    remark = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if has_interval else ""
    return Cell(row["ratio"], f"{row['ratio']:.2f}{TIMES}", remark)


def _step(row: Row) -> Cell:
    p50, p99 = row["decode_step_s_p50"], row["decode_step_s_p99"]
    if p50 is None:
        return Cell(None)
    return Cell(p50, f"{_milliseconds(p50)} ms", "" if p99 is None else f"p99 {_milliseconds(p99)}")


def _ttft(row: Row) -> Cell:
    value = row["ttft_s_p50"]
    return Cell(None) if value is None else Cell(value, f"{_milliseconds(value)} ms")


def _pass_at_k(row: Row) -> Cell:
    value = row["pass_at_k"]
    return (
        Cell(None)
        if value is None
        else Cell(value, f"{value:.1%}", "" if row["k"] is None else f"k = {row['k']:.0f}")
    )


def _memory(row: Row) -> Cell:
    peak = find_peak_memory(row)
    return Cell(None) if peak is None else Cell(peak.gib, f"{peak.gib:,.2f} GiB", peak.kind)


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


COLUMNS = (
    Column(
        "output tok/s",
        "Completion tokens / wall time of the median timed round",
        _figure("output_tokens_per_s", "{:,.0f}"),
        is_main=True,
    ),
    Column(
        "spread",
        "Half of the range over the timed rounds, as a share of the median",
        _figure("relative_half_range", "±{:.1%}"),
    ),
    Column(
        "ratio",
        f"Throughput / throughput of the baseline, and its {CONFIDENCE:.0%} bootstrap interval",
        _ratio,
    ),
    Column("decode step", "Median of all decode steps, and their 99th percentile", _step),
    Column("TTFT", "From submission to the first token, median", _ttft),
    Column(
        "memory",
        "Peak of allocated device memory; reserved: what vLLM took of the device; host: of the process, on a CPU",
        _memory,
    ),
    Column(
        "roofline",
        "Bytes that a decode step must read / measured bandwidth / its time",
        _figure("roofline_fraction", "{:.1%}"),
    ),
    Column("accuracy", "Correct of the judged completions", _figure("accuracy", "{:.1%}")),
    Column(
        "KL",
        "Of the driver's distribution from that of the model's own forward, on the completions that were rescored",
        _figure("kl", "{:.2g}"),
    ),
    Column(
        "pass@k",
        "How likely one of k completions of a prompt is right, without bias (Chen et al., 2021)",
        _pass_at_k,
    ),
    Column(
        "spread in group", "Standard deviation of a group's verdicts, mean", _figure("verdict_std", "{:.2f}")
    ),
    Column("all right", "Groups of which every completion is right", _figure("all_right_share", "{:.1%}")),
    Column("all wrong", "Groups of which no completion is right", _figure("all_wrong_share", "{:.1%}")),
    Column(
        "same output",
        "Requests whose completion equals the baseline's, token by token",
        _figure("same_completions_share", "{:.1%}"),
    ),
)
