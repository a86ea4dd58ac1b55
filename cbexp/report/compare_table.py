"""A comparison as text for the terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from cbexp.report.compare import NO_REGRESSION, REGRESSION, UNCLEAR, Change, describe_rule, exit_status
from cbexp.report.environments import format_notes
from cbexp.report.run import Run
from cbexp.report.text_table import format_columns

HEADERS = ("cell", "verdict", "old tok/s", "new tok/s", "new / old", "interval", "accuracy", "because")
RULE_COLUMNS = 100
VERDICTS = {
    NO_REGRESSION: "no regression",
    REGRESSION: "REGRESSION",
    UNCLEAR: "UNCLEAR whether there is a regression",
}


def format_comparison(
    old: Sequence[Run], new: Sequence[Run], changes: Sequence[Change], threshold: float
) -> str:
    """A row for each cell, then differences between the environments, the rule, and the verdict."""
    table = format_columns(HEADERS, [_cells(change) for change in changes], (0, 1, len(HEADERS) - 1))

    sides = {"OLD": {run.folder for run in old}, "NEW": {run.folder for run in new}}

    def describe(some: Sequence[Run]) -> str:
        return " and ".join(
            name for name, folders in sides.items() if any(run.folder in folders for run in some)
        )

    notes = format_notes([*old, *new], describe)
    rule = textwrap.fill(describe_rule(threshold), RULE_COLUMNS)
    return "\n".join([part for part in (table, notes, f"{rule}\n", _verdict(changes)) if part])


def _verdict(changes: Sequence[Change]) -> str:
    counts = Counter(change.verdict for change in changes)
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{VERDICTS[exit_status(changes)]}: {listed}\n"


def _cells(change: Change) -> list[str]:
    ratio = change.ratio
    interval = None if ratio is None else ratio.interval
    return [
        change.label,
        change.verdict,
        _throughput(change.old),
        _throughput(change.new),
        "-" if ratio is None else f"{ratio.value:.3f}",
        "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}",
        _accuracies(change),
        change.reason,
    ]


def _throughput(run: Run | None) -> str:
    rate = None if run is None or not run.is_completed else run.output_tokens_per_s
    return "-" if rate is None else f"{rate:,.0f}"


def _accuracies(change: Change) -> str:
    found = [None if run is None else run.figure("accuracy") for run in (change.old, change.new)]
    if all(accuracy is None for accuracy in found):
        return "-"
    return " > ".join("-" if accuracy is None else f"{accuracy:.1%}" for accuracy in found)
