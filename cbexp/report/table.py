"""The table of runs as text for the terminal, and as markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence

from cbexp.report.errors import ReportError
from cbexp.report.peak_memory import find_peak_memory
from cbexp.report.rows import Row, format_row_numbers, run_rows
from cbexp.report.run import Run
from cbexp.report.table_notes import describe_table
from cbexp.report.text_table import format_columns, printable
from cbexp.report.workloads import Workload, find_workloads, letters_of

HEADERS = (
    "#",
    "workload",
    "cell",
    "status",
    "output tok/s",
    "spread",
    "ratio",
    "memory",
    "roofline",
    "accuracy",
    "KL",
    "pass@k",
)
# Headers of columns that not every table has, and their figures.
RARE = {"KL": "kl", "pass@k": "pass_at_k"}


def format_table(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The runs of each workload, sorted by throughput, as a table without colours, and notes below it.

    Raises:
        ReportError: there is no run, or `baseline` names none or several.
    """
    return format_rows(_some_rows(runs, baseline), runs, baseline)


def format_rows(rows: Sequence[Row], runs: Sequence[Run], baseline: str | None) -> str:
    """The table and notes of rows that `run_rows` made of these runs and this baseline."""
    workloads = find_workloads(rows, runs)
    headers = _headers(rows, workloads)
    texts = [headers.index(name) for name in ("workload", "cell", "status") if name in headers]
    table = format_columns(headers, _cells(rows, workloads), text_columns=texts)
    notes = "".join(f"{printable(line)}\n" for line in describe_table(rows, workloads, baseline))
    return f"{table}\n{notes}" if notes else table


def format_markdown(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The same as a markdown table. Characters that are markup in markdown are escaped."""
    rows = _some_rows(runs, baseline)
    workloads = find_workloads(rows, runs)
    headers = _headers(rows, workloads)
    num_texts = len(headers) - headers.index("output tok/s")
    lines = [
        _markdown_line(headers),
        "|---:|" + "---|" * (len(headers) - 1 - num_texts) + "---:|" * num_texts,
    ]
    lines += [_markdown_line([_escape_markdown(cell) for cell in cells]) for cells in _cells(rows, workloads)]
    notes = [_escape_markdown(line) for line in describe_table(rows, workloads, baseline)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def format_csv(runs: Sequence[Run], baseline: str | None = None) -> str:
    """All of `run_rows` as CSV, its keys as header. Missing values are empty."""
    rows = _some_rows(runs, baseline)
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def format_json(runs: Sequence[Run], baseline: str | None = None) -> str:
    """All of `run_rows` as a JSON list of objects."""
    return json.dumps(_some_rows(runs, baseline), indent=2, allow_nan=False) + "\n"


def name_by_number(rows: Sequence[Row]) -> Callable[[Sequence[Run]], str]:
    """A function that names runs by their numbers in the table of `rows`, and all runs by `all`."""
    numbers = {row["folder"]: number for number, row in enumerate(rows, start=1)}

    def name(some: Sequence[Run]) -> str:
        return (
            "all"
            if len(some) == len(rows) > 1
            else format_row_numbers([numbers[str(run.folder)] for run in some])
        )

    return name


def require_runs(runs: Sequence[Run]) -> None:
    """Refuse an empty report.

    Raises:
        ReportError: there is no run.
    """
    if not runs:
        raise ReportError("no runs: none of the folders holds status.json, summary.json or sweep.json.")


def _some_rows(runs: Sequence[Run], baseline: str | None) -> list[Row]:
    require_runs(runs)
    return run_rows(runs, baseline)


def _headers(rows: Sequence[Row], workloads: Sequence[Workload]) -> list[str]:
    """The headers, with `workload` only where there are several, and others only where a run has such a figure."""
    absent = {"workload"} if len(workloads) < 2 else set()
    absent |= {name for name, figure in RARE.items() if all(row[figure] is None for row in rows)}
    return [name for name in HEADERS if name not in absent]


def _cells(rows: Sequence[Row], workloads: Sequence[Workload]) -> list[list[str]]:
    letters, headers = letters_of(workloads), _headers(rows, workloads)
    cells = [
        (
            str(index),
            letters.get(row["folder"], "-"),
            row["label_in_work"],
            row["status"],
            _shown(row["output_tokens_per_s"], ",.0f"),
            _shown(row["relative_half_range"], ".1%", "±"),
            row["no_ratio"] or _shown(row["ratio"], ".2f", after="x"),
            _shown_memory(row),
            _shown(row["roofline_fraction"], ".1%"),
            _shown(row["accuracy"], ".1%"),
            _shown(row["kl"], ".2g"),
            _shown(row["pass_at_k"], ".1%"),
        )
        for index, row in enumerate(rows, start=1)
    ]
    return [[cell for name, cell in zip(HEADERS, own, strict=True) if name in headers] for own in cells]


def _shown(value: float | None, form: str, before: str = "", after: str = "") -> str:
    return "-" if value is None else f"{before}{value:{form}}{after}"


def _shown_memory(row: Row) -> str:
    peak = find_peak_memory(row)
    return "-" if peak is None else f"{peak.gib:.2f} GiB {peak.kind}".rstrip()


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_markdown(text: str) -> str:
    escaped = "".join(f"\\{sign}" if sign in "\\`*_[]<>|#~" else sign for sign in text)
    return escaped.replace("\n", " ")
