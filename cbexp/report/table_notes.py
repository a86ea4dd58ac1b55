"""The lines below the table: who leads, what the ratios are to, and what the workloads are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cbexp.report.lead import Lead
from cbexp.report.rows import Row, format_row_numbers
from cbexp.report.workload_order import describe_reference
from cbexp.report.workloads import Workload


def describe_table(rows: Sequence[Row], workloads: Sequence[Workload], baseline: str | None) -> list[str]:
    """All lines below the table of `rows`."""
    notes = [*_describe_leads(workloads, rows), *describe_baselines(rows, baseline)]
    for workload in workloads if len(workloads) > 1 else ():
        shared = f": {workload.shared_overrides}" if workload.shared_overrides else ""
        notes.append(f"workload {workload.letter}: {workload.description}{shared}")
    reference = describe_reference([Path(row["folder"]) for row in rows])
    return notes if reference is None else [*notes, reference]


def describe_baselines(rows: Sequence[Row], named: str | None) -> list[str]:
    """What the ratios are to, and how many workloads there are, a line each."""
    baselines = [index for index, row in enumerate(rows, start=1) if row["is_baseline"]]
    hashes = {row["workload_hash"] for row in rows if row["workload_hash"] is not None}
    several = f"{len(hashes)} different workloads (prompts, limits, sampling)"
    if not baselines:
        return [f"{several}: no ratio stands between them"] if len(hashes) > 1 else []
    if len(hashes) == 1:
        row = rows[baselines[0] - 1]
        return [f"ratio to #{baselines[0]}, {row['label_in_work']}{'' if named else ' (the slowest)'}"]
    which = repr(named) if named else "the slowest run"
    return [f"{several}: a ratio is to {which} of the same workload, {format_row_numbers(baselines)}"]


def _describe_leads(workloads: Sequence[Workload], rows: Sequence[Row]) -> list[str]:
    """A line for each workload with several runs. Runs are named by their numbers in the table."""
    numbers = {row["folder"]: number for number, row in enumerate(rows, start=1)}
    return [
        _describe_lead(workload.lead, workload.rows[0], numbers)
        for workload in workloads
        if workload.lead is not None
    ]


def _describe_lead(lead: Lead, best: Row, numbers: Mapping[str, int]) -> str:
    sentence = f"#{numbers[best['folder']]} {_compare(lead, numbers)}"
    if lead.same:
        sentence += (
            f"; {format_row_numbers([numbers[row['folder']] for row in lead.same])}: the same in effect"
        )
    if lead.more_accurate is not None:
        other = numbers[lead.more_accurate["folder"]]
        sentence += f"; its answers are wrong more often than those of #{other}, beyond chance"
    return sentence


def _compare(lead: Lead, numbers: Mapping[str, int]) -> str:
    rival, ratio = lead.rival, lead.ratio
    if rival is None or ratio is None:
        return "has no other configuration beside it"
    name = f"#{numbers[rival['folder']]}"
    if lead.verdict == "shared":
        return f"makes {ratio.value:.2f}x what {name} does, but the same configuration also came out slower than it"
    if ratio.interval is None:
        return f"makes {ratio.value:.2f}x what {name} does; too few rounds to tell how sure that is"
    span = f"{ratio.value:.2f}x ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"
    if lead.verdict == "ahead":
        return f"is ahead of {name} beyond the noise: {span}"
    return f"is not clearly ahead of {name}: {span}"
