"""Which run is the baseline of each workload, and the ratio of throughputs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cbexp.report.bootstrap import Interval, ratio_interval
from cbexp.report.errors import ReportError
from cbexp.report.labels import label_runs
from cbexp.report.run import Run

OTHER_WORKLOAD = "other workload"


@dataclass(frozen=True)
class Ratio:
    """Throughput of a run / throughput of its baseline. `interval` is None with too few rounds."""

    value: float
    interval: Interval | None


def choose_baselines(runs: Sequence[Run], named: str | None) -> dict[str, Run]:
    """The baseline of each `workload_hash` that has one.

    `named` is a run's label or some of its overrides: `compile=eager`, or `compile=eager driver=sync`. It must fit at
    most one completed run of each workload. A workload in which it fits none has no baseline and no ratios. If `named`
    is None, the slowest completed run of each workload with at least two is its baseline.

    Raises:
        ReportError: `named` fits no completed run, or several of the same workload.
    """
    if named is None:
        return _slowest(runs)
    words, labels = set(named.split()), label_runs(runs)
    baselines: dict[str, Run] = {}
    for run in _comparable(runs):
        if named != labels[run.folder] and not words <= set(run.overrides):
            continue
        other = baselines.setdefault(str(run.workload_hash), run)
        if other is not run:
            raise ReportError(
                f"baseline {named!r} fits several runs of one workload: {labels[other.folder]!r} and "
                f"{labels[run.folder]!r}. Name one of them."
            )
    if not baselines:
        raise ReportError(f"baseline {named!r} fits no completed run. {_choices(runs, labels)}")
    return baselines


def ratio_of(run: Run, baselines: Mapping[str, Run]) -> Ratio | None:
    """The ratio of a run to the baseline of its workload; None without such a baseline, or without figures."""
    base = baselines.get(run.workload_hash or "")
    if base is None or not _is_comparable(run):
        return None
    return ratio_between(run, base)


def ratio_between(run: Run, base: Run) -> Ratio:
    """The ratio of two completed runs.

    Raises:
        ReportError: their workloads differ or are unknown, or one of them has no throughput.
    """
    if run.workload_hash is None or run.workload_hash != base.workload_hash:
        raise ReportError(
            f"{run.folder} and {base.folder} have different workloads "
            f"(workload_hash {_short(run)} and {_short(base)}): a ratio would compare nothing. "
            "Compare runs of the same prompts, limits and sampling."
        )
    rate, base_rate = run.output_tokens_per_s, base.output_tokens_per_s
    if rate is None or base_rate is None or base_rate <= 0:
        raise ReportError(f"{run.folder if rate is None else base.folder} has no throughput to compare.")
    return Ratio(rate / base_rate, ratio_interval(run.rounds, base.rounds))


def _slowest(runs: Sequence[Run]) -> dict[str, Run]:
    by_workload: dict[str, list[Run]] = {}
    for run in _comparable(runs):
        by_workload.setdefault(str(run.workload_hash), []).append(run)
    return {
        workload_hash: min(its_runs, key=lambda run: run.output_tokens_per_s or 0.0)
        for workload_hash, its_runs in by_workload.items()
        if len(its_runs) > 1
    }


def _comparable(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if _is_comparable(run)]


def _is_comparable(run: Run) -> bool:
    return run.is_completed and run.workload_hash is not None and (run.output_tokens_per_s or 0.0) > 0


def _choices(runs: Sequence[Run], labels: Mapping[Path, str]) -> str:
    choices = ", ".join(repr(labels[run.folder]) for run in _comparable(runs))
    return f"Completed: {choices}." if choices else "No run has completed."


def _short(run: Run) -> str:
    return "missing" if run.workload_hash is None else run.workload_hash[:12]
