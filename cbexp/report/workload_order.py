"""The order of workloads: the reader's newest first, those of outputs/reference last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cbexp.report.json_files import text
from cbexp.report.run import Run

REFERENCE = ("outputs", "reference")


def order_workloads(runs: Sequence[Run]) -> list[str]:
    """The workload hashes of completed runs, the one with the newest run first.

    Workloads that have runs in outputs/reference only come after all others.
    """
    newest: dict[str, tuple[bool, str]] = {}
    for run in runs:
        if run.is_completed and run.workload_hash is not None:
            age = (not is_reference(run.folder), text(run.status_record, "started_at") or "")
            newest[run.workload_hash] = max(age, newest.get(run.workload_hash, age))
    return sorted(newest, key=newest.__getitem__, reverse=True)


def is_reference(folder: Path) -> bool:
    """Whether a run is one of outputs/reference, which comes with the checkout."""
    parts = folder.resolve().parts
    return REFERENCE in pairwise(parts)


def describe_reference(folders: Sequence[Path]) -> str | None:
    """How many of the runs came with the checkout; None if none or all did."""
    num_reference = sum(is_reference(folder) for folder in folders)
    if not 0 < num_reference < len(folders):
        return None
    are = "run is" if num_reference == 1 else "runs are"
    return f"{num_reference} of {len(folders)} {are} from {'/'.join(REFERENCE)}, which came with the checkout"
