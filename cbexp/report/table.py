"""The table on the terminal, and the same as markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from cbexp.report.errors import ReportError
from cbexp.report.lead_words import describe_leads
from cbexp.report.numbers_of_rows import format_numbers
from cbexp.report.peak_memory import find_peak_memory
from cbexp.report.rows import Row, run_rows
from cbexp.report.run import Run
from cbexp.report.text_table import format_columns, printable
from cbexp.report.work_order import describe_reference
from cbexp.report.works import Work, find_works, letters_of

HEADERS = ("#", "work", "cell", "status", "output tok/s", "spread", "ratio", "memory", "roofline", "accuracy")


def format_table(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The runs work by work, sorted by throughput, and what the ratio is to, as text without colours; notes end it.

    Raises:
        ReportError: there is no run, or `baseline` names none or several.
    """
    return format_rows(_some_rows(runs, baseline), runs, baseline)


def format_rows(rows: Sequence[Row], runs: Sequence[Run], baseline: str | None) -> str:
    """The table of `run_rows` that were made of these runs with this baseline."""
    works = find_works(rows, runs)
    headers = _headers(works)
    texts = [headers.index(name) for name in ("work", "cell", "status") if name in headers]
    table = format_columns(headers, _cells(rows, works), text_columns=texts)
    notes = "".join(f"{printable(line)}\n" for line in _notes(rows, works, baseline))
    return f"{table}\n{notes}" if notes else table


def format_markdown(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The same as a markdown table; text that would be markup there is escaped."""
    rows = _some_rows(runs, baseline)
    works = find_works(rows, runs)
    headers = _headers(works)
    num_texts = len(headers) - headers.index("output tok/s")
    lines = [
        _markdown_line(headers),
        "|---:|" + "---|" * (len(headers) - 1 - num_texts) + "---:|" * num_texts,
    ]
    lines += [_markdown_line([_escape_markdown(cell) for cell in cells]) for cells in _cells(rows, works)]
    notes = [_escape_markdown(line) for line in _notes(rows, works, baseline)]
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
    """What the ratios are to, and how many different works there are, a line each."""
    baselines = [index for index, row in enumerate(rows, start=1) if row["is_baseline"]]
    works = {row["workload_hash"] for row in rows if row["workload_hash"] is not None}
    several = f"{len(works)} different works (prompts, limits, sampling)"
    if not baselines:
        return [f"{several}: no ratio stands between them"] if len(works) > 1 else []
    if len(works) == 1:
        row = rows[baselines[0] - 1]
        return [f"ratio to #{baselines[0]}, {row['label_in_work']}{'' if named else ' (the slowest)'}"]
    which = repr(named) if named else "the slowest run"
    return [f"{several}: a ratio is to {which} of the same work, {format_numbers(baselines)}"]


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


def _headers(works: Sequence[Work]) -> list[str]:
    """Which work a run did is told where there are several."""
    return [name for name in HEADERS if name != "work" or len(works) > 1]


def _notes(rows: Sequence[Row], works: Sequence[Work], baseline: str | None) -> list[str]:
    """What leads, what the ratios are to, what each of several works is, and which runs are not the reader's own."""
    notes = [*describe_leads(works, rows), *describe_baselines(rows, baseline)]
    for work in works if len(works) > 1 else ():
        words = f": {work.shared_words}" if work.shared_words else ""
        notes.append(f"work {work.letter}: {work.description}{words}")
    reference = describe_reference([Path(row["folder"]) for row in rows])
    return notes if reference is None else [*notes, reference]


def _cells(rows: Sequence[Row], works: Sequence[Work]) -> list[list[str]]:
    letters = letters_of(works)
    return [
        [
            str(index),
            *([letters.get(row["folder"], "-")] if len(works) > 1 else []),
            row["label_in_work"],
            row["status"],
            _shown(row["output_tokens_per_s"], ",.0f"),
            _shown(row["relative_half_range"], ".1%", "±"),
            row["no_ratio"] or _shown(row["ratio"], ".2f", after="x"),
            _shown_memory(row),
            _shown(row["roofline_fraction"], ".1%"),
            _shown(row["accuracy"], ".1%"),
        ]
        for index, row in enumerate(rows, start=1)
    ]


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
