"""Builds a model with random weights directly on its device and in its dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cbexp.model.attention_choice import AttentionChoice


def build_random_model(
    architecture: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionChoice,
    seed: int,
) -> PreTrainedModel:
    """Return a model in eval mode whose weights follow transformers' own initialisation, drawn from `seed`.

    Every tensor is created on `device` in `dtype`. Nothing is drawn on the host and copied. Global random states do not
    change.
    """
    auto_class: Any = AutoModelForCausalLM
    with seeded(seed, device), torch.device(device):
        model: PreTrainedModel = auto_class.from_config(
            copy.deepcopy(architecture), dtype=dtype, attn_implementation=attention.implementation
        )
    model.train(False)
    return model


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of `device` inside the context, and restore them after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
