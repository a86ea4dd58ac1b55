"""The memory that weights take, and that a device has. Loads no weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cbexp.engine.sizing import format_gib
from cbexp.errors import MemoryBudgetError
from cbexp.model.architecture import uses_remote_code


@dataclass(frozen=True)
class WeightSize:
    """The size of a model's parameters. Tied weights count once, buffers do not count."""

    num_parameters: int
    num_bytes: int


def measure_weights(architecture: PreTrainedConfig, dtype: torch.dtype) -> WeightSize:
    """Return the size of the model's weights in `dtype`, from a copy on the meta device."""
    auto_class: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(
            copy.deepcopy(architecture), dtype=dtype, trust_remote_code=uses_remote_code(architecture)
        )
    return sum_weights(model)


def sum_weights(model: torch.nn.Module) -> WeightSize:
    """Return the size of a model's parameters as they are."""
    parameters = list(model.parameters())
    return WeightSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )


def total_memory_bytes(device: torch.device) -> int:
    """Return the bytes of `device`. Unlike `free_memory_bytes` this allocates nothing on a GPU."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(device).total_memory)


def check_fits(
    weight_bytes: int, cache_bytes: int, free_bytes: int, device: torch.device, what_to_lower: str
) -> None:
    """Raise `MemoryBudgetError` if weights and cache do not fit; its message has the numbers and `what_to_lower`."""
    if weight_bytes + cache_bytes <= free_bytes:
        return
    raise MemoryBudgetError(
        f"{device} has {format_gib(free_bytes)} free, and {format_gib(weight_bytes + cache_bytes)} are asked for: "
        f"weights {format_gib(weight_bytes)}, KV cache with a step's buffers {format_gib(cache_bytes)}. "
        f"Lower {what_to_lower}."
    )
