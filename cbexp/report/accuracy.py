"""Whether a run's answers are wrong more often than another's, beyond chance."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from cbexp.report.json_files import positive_number
from cbexp.report.run import Run

STANDARD_ERRORS = 1.96  # 95 % of a normal distribution, two-sided


def find_most_accurate(runs: Iterable[Run]) -> Run | None:
    """The run with the largest share of correct completions; None where nothing was judged."""
    judged = [(accuracy[0], run) for run in runs if (accuracy := _accuracy(run)) is not None]
    return max(judged, key=lambda pair: pair[0])[1] if judged else None


def is_less_accurate(run: Run, than: Run) -> bool:
    """Two proportions, taken as independent; of the same prompts their difference varies less than that."""
    before, after = _accuracy(than), _accuracy(run)
    if before is None or after is None:
        return False
    variance = sum(share * (1 - share) / num_judged for share, num_judged in (before, after))
    return before[0] - after[0] > STANDARD_ERRORS * sqrt(variance)


def _accuracy(run: Run) -> tuple[float, float] | None:
    """Share of correct completions, and how many one round judges: the others judge the same prompts again."""
    share = run.figure("accuracy")
    num_judged, num_rounds = (positive_number(run.summary, name) for name in ("num_judged", "num_rounds"))
    if share is None or not 0 <= share <= 1 or num_judged is None or num_rounds is None:
        return None
    return share, num_judged / num_rounds
