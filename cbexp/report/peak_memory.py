"""Which of a run's memory peaks is shown."""

from __future__ import annotations

from dataclasses import dataclass

from cbexp.report.rows import Row

# In order of preference: allocated on the device, reserved there by vLLM, used by the process on a CPU.
KINDS = {"peak_allocated_gib": "", "peak_reserved_gib": "reserved", "peak_host_gib": "host"}


@dataclass(frozen=True)
class PeakMemory:
    """A peak in GiB. `kind` is empty for allocated device memory."""

    gib: float
    kind: str


def find_peak_memory(row: Row) -> PeakMemory | None:
    """The first peak of `KINDS` that a row has; None when it has none."""
    return next((PeakMemory(row[name], kind) for name, kind in KINDS.items() if row[name] is not None), None)
