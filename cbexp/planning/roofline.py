"""What decoding must read and how fast this device can: the inputs of the roofline, measured once a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cbexp.engine.roofline import decode_step_bytes, measure_read_bandwidth
from cbexp.engine.sizing import count_shared_tokens
from cbexp.metrics import RooflineInputs
from cbexp.planning.plan import RunPlan


def measure_roofline(plan: RunPlan, model: Any) -> RooflineInputs:
    """Return the roofline's inputs for a model on a GPU; the caches of a CPU make a bandwidth mean little.

    Raises:
        EngineError: the model runs on a CPU, or the device has no memory left to measure with.
    """
    # Of the parameters only the sizes are kept: a driver may put others in their place.
    sizes = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.named_parameters()}

    def step_bytes(batch: float, context: float) -> float:
        return decode_step_bytes(plan.architecture, sizes, round(batch), round(context)).total_bytes

    shared_tokens = partial(count_shared_tokens, page_size=plan.page_size)
    return RooflineInputs(
        measure_read_bandwidth(plan.device),
        step_bytes,
        num_generations=plan.config.dataset.num_generations,
        **({"shared_tokens": shared_tokens} if plan.block_sharing else {}),
    )
