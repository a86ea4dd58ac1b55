"""Histograms of step times, one a kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cbexp.engine.types import StepInfo

NUM_BINS = 64
STEP_KINDS = ("prefill", "mixed", "decode")


def build_step_histograms(steps: Sequence[StepInfo]) -> dict[str, Any]:
    """Return a `wandb.Histogram` of seconds a step for each kind that occurred: `histograms/decode_step_s` and so on.

    The decode steps of a burst share its time equally, and each counts.
    """
    by_kind = {kind: [step for step in steps if step.kind == kind] for kind in STEP_KINDS}
    return {
        f"histograms/{kind}_step_s": _build_histogram(chosen) for kind, chosen in by_kind.items() if chosen
    }


def _build_histogram(steps: Sequence[StepInfo]) -> Any:
    import wandb

    seconds = [step.duration_s / step.num_steps for step in steps]
    return wandb.Histogram(
        np_histogram=np.histogram(seconds, bins=NUM_BINS, weights=[step.num_steps for step in steps])
    )
