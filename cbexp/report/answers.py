"""Compares what runs answer: whether one is less accurate than another, and how much they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

from cbexp.report.json_files import Reader, number, positive_number, text
from cbexp.report.run import Run

STANDARD_ERRORS = 1.96  # 95 % of a normal distribution, two-sided


def find_most_accurate(runs: Iterable[Run]) -> Run | None:
    """The run with the largest share of correct completions; None where nothing was judged."""
    judged = [(accuracy[0], run) for run in runs if (accuracy := _accuracy(run)) is not None]
    return max(judged, key=lambda pair: pair[0])[1] if judged else None


def is_less_accurate(run: Run, than: Run) -> bool:
    """Whether a run's accuracy is lower than another's, beyond chance.

    Two proportions are compared as if they were independent. That is cautious, since the prompts are the same.
    """
    before, after = _accuracy(than), _accuracy(run)
    if before is None or after is None:
        return False
    variance = sum(share * (1 - share) / num_judged for share, num_judged in (before, after))
    return before[0] - after[0] > STANDARD_ERRORS * sqrt(variance)


def same_completions_share(run: Run, base: Run) -> float | None:
    """Share of requests whose completion has the same tokens as the baseline's; None where records do not say.

    The runs have one workload. Their first timed rounds are compared. Greedy decoding in float32 should give 1. In
    bfloat16 another order of sums may change a close choice. None of sampled runs: drivers draw numbers of their own.
    """
    if not run.rounds or not base.rounds or run.fact("do_sample") is True:
        return None
    if _round_digest(run) is not None and _round_digest(run) == _round_digest(base):
        return 1.0
    ours, theirs = _digests(run), _digests(base)
    if not ours or len(ours) != len(theirs):
        return None
    return sum(mine == other for mine, other in zip(ours, theirs, strict=True)) / len(ours)


def _accuracy(run: Run) -> tuple[float, float] | None:
    """Share of correct completions, and how many one round judges. Further rounds judge the same prompts."""
    share = run.figure("accuracy")
    num_judged, num_rounds = (positive_number(run.summary, name) for name in ("num_judged", "num_rounds"))
    if share is None or not 0 <= share <= 1 or num_judged is None or num_rounds is None:
        return None
    return share, num_judged / num_rounds


def _round_digest(run: Run) -> str | None:
    return text(run.rounds[0].record, "completions_digest")


def _digests(run: Run) -> list[str | None]:
    round_index = number(run.rounds[0].record, "round_index")
    rows: list[Mapping[str, Any]] = list(Reader(run.folder).read_rows("requests.jsonl"))
    return [text(row, "completion_digest") for row in rows if number(row, "round_index") == round_index]
