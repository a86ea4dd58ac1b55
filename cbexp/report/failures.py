"""Runs without figures: the reason, and where their records are."""

from __future__ import annotations

from collections.abc import Sequence

from cbexp.report.labels import label_runs
from cbexp.report.run import Run
from cbexp.report.text_table import printable

NO_REASON = "no reason is on record"
UNFINISHED = {"not_started": "its turn had not come", "running": "it goes on"}


def describe_reason(run: Run) -> str:
    """Why a run has no figures, from its own records."""
    reason = run.message or UNFINISHED.get(run.status, NO_REASON)
    return f"{run.error_class}: {reason}" if run.error_class and run.message else reason


def without_figures(runs: Sequence[Run]) -> list[Run]:
    """The runs that did not complete, failures first."""
    return sorted((run for run in runs if not run.is_completed), key=lambda run: not run.is_failure)


def format_failures(runs: Sequence[Run]) -> str:
    """A paragraph for each run that failed or left a message; empty when all completed."""
    labels = label_runs(runs)
    paragraphs = [
        printable(
            f"{run.status}: {labels[run.folder]}\n  {_indented(describe_reason(run))}\n  {run.folder}\n"
        )
        for run in without_figures(runs)
        if run.is_failure or run.message
    ]
    return "\n".join(paragraphs)


def _indented(text: str) -> str:
    return "\n  ".join(text.splitlines())
