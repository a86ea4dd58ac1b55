"""The table on the terminal, and the same as markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cbexp.report.baseline import OTHER_WORK
from cbexp.report.errors import ReportError
from cbexp.report.rows import run_rows
from cbexp.report.run import Run

HEADERS = ("cell", "status", "output tok/s", "spread", "ratio", "memory", "roofline", "accuracy")
MAX_LABEL_COLUMNS = 60
WIDTH = 160  # never the terminal's: a wrapped table of numbers cannot be read, and the text goes to files too

Row = Mapping[str, Any]


def format_table(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The runs sorted by throughput, and what the ratio is to, as text without colours; a line of its own ends it.

    Raises:
        ReportError: there is no run, or `baseline` names none or several.
    """
    rows = _some_rows(runs, baseline)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for header in HEADERS:
        is_text = header in HEADERS[:2]
        max_width = MAX_LABEL_COLUMNS if header == HEADERS[0] else None
        table.add_column(
            header,
            justify="left" if is_text else "right",
            overflow="fold",
            max_width=max_width,
            no_wrap=max_width is None,
        )
    for cells in _cells(rows):
        table.add_row(*map(Text, cells))
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().strip("\n").splitlines()]
    return "\n".join([*lines, *describe_baselines(rows)]) + "\n"


def format_markdown(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The same as a markdown table; text that would be markup there is escaped."""
    rows = _some_rows(runs, baseline)
    lines = [_markdown_line(HEADERS), "|" + "---|" * 2 + "---:|" * (len(HEADERS) - 2)]
    lines += [_markdown_line([_escape_markdown(cell) for cell in cells]) for cells in _cells(rows)]
    notes = [_escape_markdown(line) for line in describe_baselines(rows)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def format_csv(runs: Sequence[Run], baseline: str | None = None) -> str:
    """All of `run_rows` with its keys as header; missing values are empty."""
    rows = _some_rows(runs, baseline)
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def format_json(runs: Sequence[Run], baseline: str | None = None) -> str:
    """All of `run_rows` as a JSON list of objects."""
    return json.dumps(_some_rows(runs, baseline), indent=2, allow_nan=False) + "\n"


def describe_baselines(rows: Sequence[Row]) -> list[str]:
    """What the ratios are to, and how many different works there are, a line each; nothing without a ratio."""
    named = sorted({row["baseline"] for row in rows if row["baseline"] is not None})
    works = {row["workload_hash"] for row in rows if row["workload_hash"] is not None}
    lines = [f"ratio to {', '.join(named)}"] if named else []
    if len(works) > 1:
        lines.append(
            f"{len(works)} different workloads (prompts, limits, sampling): ratios stand only within the same one"
        )
    return lines


def _some_rows(runs: Sequence[Run], baseline: str | None) -> list[dict[str, Any]]:
    if not runs:
        raise ReportError("no runs: none of the folders holds status.json, summary.json or sweep.json.")
    return run_rows(runs, baseline)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    has_ratios = any(row["ratio"] is not None for row in rows)
    return [
        [
            row["label"],
            row["status"],
            _shown(row["output_tokens_per_s"], ",.0f"),
            _shown(row["relative_half_range"], ".1%", "±"),
            _shown_ratio(row, has_ratios),
            _shown_memory(row),
            _shown(row["roofline_fraction"], ".1%"),
            _shown(row["accuracy"], ".1%"),
        ]
        for row in rows
    ]


def _shown(value: float | None, form: str, before: str = "", after: str = "") -> str:
    return "-" if value is None else f"{before}{value:{form}}{after}"


def _shown_ratio(row: Row, has_ratios: bool) -> str:
    is_without = row["ratio"] is None and row["output_tokens_per_s"] is not None
    return OTHER_WORK if is_without and has_ratios else _shown(row["ratio"], ".2f", after="x")


def _shown_memory(row: Row) -> str:
    if row["peak_allocated_gib"] is None:
        return _shown(row["peak_host_gib"], ".2f", after=" GiB host")
    return _shown(row["peak_allocated_gib"], ".2f", after=" GiB")


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_markdown(text: str) -> str:
    escaped = "".join(f"\\{sign}" if sign in "\\`*_[]<>|#~" else sign for sign in text)
    return escaped.replace("\n", " ")
