"""Runs by workload, and the winner of each. Runs of different workloads are never compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from cbexp.report.labels import overrides_shared_in_workloads
from cbexp.report.lead import Lead, find_lead
from cbexp.report.rows import Row
from cbexp.report.run import Run


@dataclass(frozen=True)
class Workload:
    """The completed runs of one workload, the fastest first.

    `shared_overrides` are those that all of its runs have, and not all runs of the report. `lead` is None for a single
    run. `has_winner` is false for a single run among other workloads: it has nothing to win against.
    """

    letter: str
    description: str
    shared_overrides: str
    rows: Sequence[Row]
    lead: Lead | None
    has_winner: bool


def find_workloads(rows: Sequence[Row], runs: Sequence[Run]) -> list[Workload]:
    """The workloads of the rows of `run_rows`, in their order.

    Runs without a workload_hash or without output are in none.
    """
    by_hash: dict[str, list[Row]] = {}
    for row in rows:
        if row["workload_hash"] is not None and (row["output_tokens_per_s"] or 0.0) > 0:
            by_hash.setdefault(row["workload_hash"], []).append(row)
    by_folder = {str(run.folder): run for run in runs}
    is_only, shared = len(by_hash) == 1, overrides_shared_in_workloads(runs)
    return [
        _build_workload(_letter(index), shared.get(workload_hash, ""), group, by_folder, is_only)
        for index, (workload_hash, group) in enumerate(by_hash.items())
    ]


def letters_of(workloads: Sequence[Workload]) -> dict[str, str]:
    """The letter of each run's workload, by the run's folder."""
    return {row["folder"]: workload.letter for workload in workloads for row in workload.rows}


def _build_workload(
    letter: str, shared_overrides: str, rows: Sequence[Row], by_folder: Mapping[str, Run], is_only: bool
) -> Workload:
    first = by_folder[rows[0]["folder"]]
    lead = find_lead(rows, by_folder) if len(rows) > 1 else None
    return Workload(letter, _describe(first), shared_overrides, rows, lead, is_only or len(rows) > 1)


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
    sampling = run.fact("sampling")
    if isinstance(sampling, Mapping) and sampling:
        parts.append("sampled" if run.fact("do_sample") is True else "greedy")
        parts[-1] += " with " + " ".join(f"{name}={value}" for name, value in sampling.items())
    return ", ".join(parts)


def _is_exact(run: Run) -> bool:
    return run.fact("is_fixed_length") is True and not run.fact("has_limits_per_prompt")
