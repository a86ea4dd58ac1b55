"""The table on the terminal, and the same as markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence

from cbexp.report.baseline import OTHER_WORK
from cbexp.report.errors import ReportError
from cbexp.report.peak_memory import find_peak_memory
from cbexp.report.rows import Row, run_rows
from cbexp.report.run import Run
from cbexp.report.text_table import format_columns

HEADERS = ("#", "cell", "status", "output tok/s", "spread", "ratio", "memory", "roofline", "accuracy")


def format_table(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The runs sorted by throughput, and what the ratio is to, as text without colours; a line of its own ends it.

    Raises:
        ReportError: there is no run, or `baseline` names none or several.
    """
    return format_rows(_some_rows(runs, baseline), baseline)


def format_rows(rows: Sequence[Row], baseline: str | None) -> str:
    """The table of `run_rows` that were made with this baseline."""
    table = format_columns(HEADERS, _cells(rows), text_columns=(1, 2))
    notes = "".join(f"{line}\n" for line in describe_baselines(rows, baseline))
    return f"{table}\n{notes}" if notes else table


def format_markdown(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The same as a markdown table; text that would be markup there is escaped."""
    rows = _some_rows(runs, baseline)
    lines = [_markdown_line(HEADERS), "|---:|---|---|" + "---:|" * (len(HEADERS) - 3)]
    lines += [_markdown_line([_escape_markdown(cell) for cell in cells]) for cells in _cells(rows)]
    notes = [_escape_markdown(line) for line in describe_baselines(rows, baseline)]
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


def describe_baselines(rows: Sequence[Row], named: str | None) -> list[str]:
    """What the ratios are to, and how many different works there are, a line each; nothing without a ratio."""
    baselines = [index for index, row in enumerate(rows, start=1) if row["is_baseline"]]
    works = {row["workload_hash"] for row in rows if row["workload_hash"] is not None}
    if not baselines:
        return []
    if len(works) == 1:
        row = rows[baselines[0] - 1]
        return [f"ratio to #{baselines[0]}, {row['label']}{'' if named else ' (the slowest)'}"]
    which = repr(named) if named else "the slowest run"
    return [
        f"{len(works)} different works (prompts, limits, sampling): a ratio is to {which} of the same work, "
        f"{format_numbers(baselines)}"
    ]


def format_numbers(numbers: Sequence[int]) -> str:
    """Rows of the table, neighbours taken together: `#1, #3-5`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"#{low}" if low == high else f"#{low}-{high}" for low, high in spans)


def name_by_number(rows: Sequence[Row]) -> Callable[[Sequence[Run]], str]:
    """A function that names runs by their numbers in the table of `rows`; all of them by `all`."""
    numbers = {row["folder"]: number for number, row in enumerate(rows, start=1)}

    def name(some: Sequence[Run]) -> str:
        return (
            "all"
            if len(some) == len(rows) > 1
            else format_numbers([numbers[str(run.folder)] for run in some])
        )

    return name


def require_runs(runs: Sequence[Run]) -> None:
    """Refuse a report of nothing.

    Raises:
        ReportError: there is no run.
    """
    if not runs:
        raise ReportError("no runs: none of the folders holds status.json, summary.json or sweep.json.")


def _some_rows(runs: Sequence[Run], baseline: str | None) -> list[Row]:
    require_runs(runs)
    return run_rows(runs, baseline)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    has_ratios = any(row["ratio"] is not None for row in rows)
    return [
        [
            str(index),
            row["label"],
            row["status"],
            _shown(row["output_tokens_per_s"], ",.0f"),
            _shown(row["relative_half_range"], ".1%", "±"),
            _shown_ratio(row, has_ratios),
            _shown_memory(row),
            _shown(row["roofline_fraction"], ".1%"),
            _shown(row["accuracy"], ".1%"),
        ]
        for index, row in enumerate(rows, start=1)
    ]


def _shown(value: float | None, form: str, before: str = "", after: str = "") -> str:
    return "-" if value is None else f"{before}{value:{form}}{after}"


def _shown_ratio(row: Row, has_ratios: bool) -> str:
    is_without = row["ratio"] is None and row["output_tokens_per_s"] is not None
    return OTHER_WORK if is_without and has_ratios else _shown(row["ratio"], ".2f", after="x")


def _shown_memory(row: Row) -> str:
    peak = find_peak_memory(row)
    return "-" if peak is None else f"{peak.gib:.2f} GiB {peak.kind}".rstrip()


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_markdown(text: str) -> str:
    escaped = "".join(f"\\{sign}" if sign in "\\`*_[]<>|#~" else sign for sign in text)
    return escaped.replace("\n", " ")
