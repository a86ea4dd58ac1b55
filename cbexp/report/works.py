"""Runs by the work that they did, and who won each: figures of different work are never compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from cbexp.report.labels import words_of_works
from cbexp.report.lead import Lead, find_lead
from cbexp.report.rows import Row
from cbexp.report.run import Run


@dataclass(frozen=True)
class Work:
    """Completed runs of the same work, the fastest first. `lead` is that of the fastest over the others.

    `shared_words` are settings that all of its runs have, and not all runs of the report.

    `is_contest`: there is something to compare, or it is all there is; a lone run among others has won nothing.
    """

    letter: str
    description: str
    shared_words: str
    rows: Sequence[Row]
    lead: Lead | None
    is_contest: bool


def find_works(rows: Sequence[Row], runs: Sequence[Run]) -> list[Work]:
    """The works in the order of `rows`, which is that of `run_rows`.

    Runs without a hash, or without output, are in none.
    """
    by_hash: dict[str, list[Row]] = {}
    for row in rows:
        if row["workload_hash"] is not None and (row["output_tokens_per_s"] or 0.0) > 0:
            by_hash.setdefault(row["workload_hash"], []).append(row)
    by_folder = {str(run.folder): run for run in runs}
    is_only, words = len(by_hash) == 1, words_of_works(runs)
    return [
        _work(_letter(index), words.get(work, ""), group, by_folder, is_only)
        for index, (work, group) in enumerate(by_hash.items())
    ]


def letters_of(works: Sequence[Work]) -> dict[str, str]:
    """The folder of each run that is in a work -> the letter of its work."""
    return {row["folder"]: work.letter for work in works for row in work.rows}


def _work(
    letter: str, shared_words: str, rows: Sequence[Row], by_folder: Mapping[str, Run], is_only: bool
) -> Work:
    first = by_folder[rows[0]["folder"]]
    lead = find_lead(rows, by_folder) if len(rows) > 1 else None
    return Work(letter, _describe(first), shared_words, rows, lead, is_only or len(rows) > 1)


def _letter(index: int) -> str:
    """A to Z, then A2 and so on."""
    rest, position = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[position] + (str(rest + 1) if rest else "")


def _describe(run: Run) -> str:
    num_prompts, num_generations = run.figure("num_prompts"), run.figure("num_generations")
    limit = run.figure("max_new_tokens")
    parts = [str(run.fact(name)) for name in ("model", "dataset") if run.fact(name)]
    if num_prompts is not None:
        times = f", {num_generations:.0f} completions each" if num_generations and num_generations > 1 else ""
        parts.append(f"{num_prompts:,.0f} prompts{times}")
    if limit is not None:
        parts.append(f"{'exactly' if _is_exact(run) else 'up to'} {limit:,.0f} new tokens")
    return ", ".join(parts)


def _is_exact(run: Run) -> bool:
    return run.fact("is_fixed_length") is True and not run.fact("has_limits_per_prompt")
