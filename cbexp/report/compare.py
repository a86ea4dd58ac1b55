"""Compares two reports cell by cell: what became slower, fails or answers wrongly, by one rule, for CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cbexp.report import bootstrap
from cbexp.report.answers import STANDARD_ERRORS, is_less_accurate
from cbexp.report.baseline import Ratio, ratio_between
from cbexp.report.errors import ReportError
from cbexp.report.labels import label_runs, relevant_overrides
from cbexp.report.run import Run

Verdict = Literal[
    "slower", "failed", "missing", "less accurate", "unclear", "faster", "no clear change", "new", "ignored"
]

DEFAULT_THRESHOLD = 0.02
REGRESSIONS: tuple[Verdict, ...] = ("slower", "failed", "missing", "less accurate")
# Exit statuses; 2 is that of a command that cannot be carried out.
NO_REGRESSION, REGRESSION, UNCLEAR = 0, 1, 3


@dataclass(frozen=True)
class Change:
    """The verdict on one cell. `reason` explains it where the ratio alone does not."""

    label: str
    verdict: Verdict
    old: Run | None
    new: Run | None
    ratio: Ratio | None
    reason: str


def describe_rule(threshold: float) -> str:
    """The rule of the verdicts, in words."""
    return (
        f"Rule: a cell is slower when the whole interval of new / old lies below {1 - threshold:g}, faster when it "
        f"lies above {1 + threshold:g} ({bootstrap.RULE}). It is less accurate when the share of correct completions "
        f"falls by more than {STANDARD_ERRORS:g} standard errors of the difference, those of one round. A cell that "
        "completed in OLD and did not in NEW has failed or is missing. Cells are paired by their overrides. Different "
        "workloads (workload_hash) or too few rounds: unclear."
    )


def compare_runs(old: Sequence[Run], new: Sequence[Run], threshold: float) -> list[Change]:
    """The change of every cell, regressions first. A single run on each side is paired whatever its overrides.

    Raises:
        ReportError: a side has no runs, or two with the same overrides, or `threshold` is not in [0, 1).
    """
    if not 0 <= threshold < 1:
        raise ReportError(f"threshold={threshold:g} is outside [0, 1): give a share, as 0.02 for 2 %.")
    labels = label_runs(old) | label_runs(new)
    changes = [_judge(labels, *pair, threshold) for pair in _pair(old, new)]
    order = [*REGRESSIONS, "unclear", "faster", "no clear change", "new", "ignored"]
    return sorted(changes, key=lambda change: order.index(change.verdict))


def exit_status(changes: Sequence[Change]) -> int:
    """1 with a regression. 3 if without one a cell is unclear or none was compared. Otherwise 0."""
    verdicts = {change.verdict for change in changes}
    if verdicts & set(REGRESSIONS):
        return REGRESSION
    is_judged = bool(verdicts & {"no clear change", "faster"})
    return UNCLEAR if "unclear" in verdicts or not is_judged else NO_REGRESSION


def _pair(old: Sequence[Run], new: Sequence[Run]) -> list[tuple[Run | None, Run | None]]:
    for side, runs in (("OLD", old), ("NEW", new)):
        if not runs:
            raise ReportError(f"{side} has no runs: none of its folders holds status.json or sweep.json.")
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    old_by_key, new_by_key = _by_overrides(old, "OLD"), _by_overrides(new, "NEW")
    return [(old_by_key.get(key), new_by_key.get(key)) for key in dict.fromkeys([*old_by_key, *new_by_key])]


def _by_overrides(runs: Sequence[Run], side: str) -> dict[frozenset[str], Run]:
    found: dict[frozenset[str], Run] = {}
    for run in runs:
        other = found.setdefault(frozenset(relevant_overrides(run)), run)
        if other is not run:
            raise ReportError(
                f"{side}: {other.folder} and {run.folder} have the same overrides, so that neither can be paired. "
                "Name the folder of one of them."
            )
    return found


def _judge(labels: Mapping[Path, str], old: Run | None, new: Run | None, threshold: float) -> Change:
    def change(verdict: Verdict, reason: str = "", ratio: Ratio | None = None) -> Change:
        label = next(labels[run.folder] for run in (new, old) if run is not None)
        return Change(label, verdict, old, new, ratio, reason)

    if old is None:
        return change("new", "not in OLD")
    if not old.is_completed:
        return change("ignored", f"{old.status} in OLD, so that there is nothing to compare with")
    if new is None:
        return change("missing", "completed in OLD, not in NEW")
    if not new.is_completed:
        return change("failed", f"{new.status}: {new.message}" if new.message else new.status)
    try:
        ratio = ratio_between(new, old)
    except ReportError as refusal:
        return change("unclear", str(refusal))
    if is_less_accurate(new, old):
        accuracies = f"from {old.figure('accuracy'):.1%} to {new.figure('accuracy'):.1%}"
        return change("less accurate", f"correct completions fell {accuracies}", ratio)
    return change(*_judge_ratio(ratio, threshold), ratio)


def _judge_ratio(ratio: Ratio, threshold: float) -> tuple[Verdict, str]:
    if ratio.interval is None:
        return "unclear", f"fewer than {bootstrap.MIN_ROUNDS} timed rounds; set num_rounds=5 or more"
    if ratio.interval.high < 1 - threshold:
        return "slower", ""
    return ("faster" if ratio.interval.low > 1 + threshold else "no clear change"), ""
