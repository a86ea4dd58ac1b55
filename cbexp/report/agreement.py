"""Whether two runs of the same work said the same, request by request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbexp.report.json_files import Reader, number, text
from cbexp.report.run import Run


def same_completions_share(run: Run, base: Run) -> float | None:
    """Share of the requests of a round whose completions are equal, token by token, to the baseline's.

    Of runs of the same work, by their first timed rounds. None when their records do not tell. Greedy decoding in
    float32 should give 1; in bfloat16 a different order of sums may turn a close choice.
    """
    if not run.rounds or not base.rounds:
        return None
    if _round_digest(run) is not None and _round_digest(run) == _round_digest(base):
        return 1.0
    ours, theirs = _digests(run), _digests(base)
    if not ours or len(ours) != len(theirs):
        return None
    return sum(mine == other for mine, other in zip(ours, theirs, strict=True)) / len(ours)


def _round_digest(run: Run) -> str | None:
    return text(run.rounds[0].record, "completions_digest")


def _digests(run: Run) -> list[str | None]:
    round_index = number(run.rounds[0].record, "round_index")
    rows: list[Mapping[str, Any]] = list(Reader(run.folder).read_rows("requests.jsonl"))
    return [text(row, "completion_digest") for row in rows if number(row, "round_index") == round_index]
