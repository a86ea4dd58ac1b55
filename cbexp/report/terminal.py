"""What the command prints: the table, the failures, and notes on the environment."""

from __future__ import annotations

from collections.abc import Sequence

from cbexp.report.environments import format_notes
from cbexp.report.failures import format_failures
from cbexp.report.rows import run_rows
from cbexp.report.run import Run
from cbexp.report.table import format_rows, name_by_number, require_runs


def format_report(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The whole report as text without colours.

    Raises:
        ReportError: there is no run, or `baseline` fits none or several.
    """
    require_runs(runs)
    rows = run_rows(runs, baseline)
    parts = [
        format_rows(rows, runs, baseline),
        format_failures(runs),
        format_notes(runs, name_by_number(rows)),
    ]
    return "\n".join(part for part in parts if part)
