"""Which of a run's peaks of memory is shown, and what it is of."""

from __future__ import annotations

from dataclasses import dataclass

from cbexp.report.rows import Row

# Allocated on the device where that is known; what a peer took of the device; the process's own on a CPU.
KINDS = {"peak_allocated_gib": "", "peak_reserved_gib": "reserved", "peak_host_gib": "host"}


@dataclass(frozen=True)
class PeakMemory:
    """A peak in GiB; `kind` is empty for allocated device memory, which needs no word."""

    gib: float
    kind: str


def find_peak_memory(row: Row) -> PeakMemory | None:
    """The most telling peak that a row has; None when it has none."""
    return next((PeakMemory(row[name], kind) for name, kind in KINDS.items() if row[name] is not None), None)
