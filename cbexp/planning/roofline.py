"""What decoding must read and how fast this device can: the inputs of the roofline, measured once a run."""

from __future__ import annotations

from typing import Any

import torch

from cbexp.engine.bandwidth import decode_step_bytes, measure_read_bandwidth
from cbexp.metrics import RooflineInputs
from cbexp.planning.plan import RunPlan


def measure_roofline(plan: RunPlan, model: Any) -> RooflineInputs | None:
    """Return the roofline's inputs for a loaded model; None on a CPU, whose caches make a bandwidth mean little."""
    if plan.device.type != "cuda":
        return None
    # Of the parameters only the sizes are kept: a driver may put others in their place.
    sizes = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.named_parameters()}

    def step_bytes(batch: float, context: float) -> float:
        return decode_step_bytes(plan.architecture, sizes, round(batch), round(context)).total_bytes

    return RooflineInputs(measure_read_bandwidth(plan.device), step_bytes)
