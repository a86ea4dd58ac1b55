"""Which attention a model runs, the engine's own or one of transformers': `auto` resolved, what is missing named."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from cbexp.checks import check_choice
from cbexp.drivers.registry import DRIVERS, DriverKind
from cbexp.engine.sizing import MASKED_ATTENTIONS
from cbexp.engine.types import ENGINE_ATTENTION
from cbexp.errors import ConfigError, ModelError, NotApplicableError
from cbexp.model.architecture import causal_model_class


@dataclass(frozen=True)
class AttentionChoice:
    """The engine's attention (`cbexp`) or an implementation by transformers' name.

    `reason` says why `auto` took another of transformers' than sdpa.
    """

    implementation: str
    reason: str | None = None

    @property
    def is_masked(self) -> bool:
        """Whether it reads an attention mask and repeats keys and values for every query head."""
        return self.implementation in MASKED_ATTENTIONS


@dataclass(frozen=True)
class _FlashPackage:
    distribution: str
    is_available: Callable[[], bool]


FLASH_PACKAGES = {
    "flash_attention_2": _FlashPackage("flash-attn", is_flash_attn_2_available),
    "flash_attention_3": _FlashPackage("flash-attn-3", is_flash_attn_3_available),
    "flash_attention_4": _FlashPackage("flash-attn-4", is_flash_attn_4_available),
}
ATTENTION_IMPLEMENTATIONS = ("auto", ENGINE_ATTENTION, "sdpa", "eager", *FLASH_PACKAGES)


def resolve_attention(
    name: str, kind: DriverKind, architecture: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """Return the attention that a driver runs when `name` is asked for: auto is its own where it has one.

    Raises:
        ConfigError: the driver does not have it; and all that `resolve_loaded_attention` raises.
    """
    if kind.own_attention is not None and name in ("auto", kind.own_attention):
        return AttentionChoice(kind.own_attention)
    if not kind.has_other_attentions:
        raise ConfigError(
            f"model.attn_implementation={name} does not work with driver={kind.name}, which chooses its attention "
            "itself: use auto."
        )
    if name == ENGINE_ATTENTION:
        owner = next(kind.name for kind in DRIVERS.values() if kind.own_attention == name)
        raise ConfigError(
            f"model.attn_implementation={name} is driver={owner}'s own and does not work with driver={kind.name}: use "
            f"driver={owner}, or model.attn_implementation=auto."
        )
    if kind.is_best_with_flash and name == "auto":
        return _choose_flash(architecture, device, dtype)
    return resolve_loaded_attention(name, architecture, device, dtype)


def _choose_flash(
    architecture: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """With a flash attention upstream's manager captures graphs and batches asynchronously: several times faster."""
    for name in _list_flash(device):
        with suppress(ConfigError, ModelError):
            _require_flash(name, architecture, device, dtype)
            return AttentionChoice(name, "the manager captures graphs with it, and it is installed")
    return _choose_attention(architecture)


def _list_flash(device: torch.device) -> tuple[str, ...]:
    """Those that upstream's manager captures graphs with and `device` runs, the fastest first."""
    if device.type != "cuda":
        return ()
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return ()
    return ("flash_attention_3", "flash_attention_2") if capability[0] == 9 else ("flash_attention_2",)


def resolve_loaded_attention(
    name: str, architecture: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """Return the implementation that transformers loads a model with: `name`, or its hub id (with a slash).

    For auto and for the engine's attention, which takes its place while it drives, it is sdpa where the model has it.

    Raises:
        ConfigError: there is no such implementation, or it does not run in `dtype`.
        ModelError: the model does not work with it, or a package that it needs is missing.
        NotApplicableError: it needs a GPU, and `device` is none.
    """
    if "/" not in name:
        check_choice("model.attn_implementation", name, ATTENTION_IMPLEMENTATIONS)
    if name in ("auto", ENGINE_ATTENTION):
        return _choose_attention(architecture)
    if name == "sdpa":
        _require_sdpa(architecture)
    elif name != "eager":
        _require_flash(name, architecture, device, dtype)
    return AttentionChoice(name)


def _choose_attention(architecture: PreTrainedConfig) -> AttentionChoice:
    model_class = causal_model_class(architecture)
    if model_class is None or model_class._supports_sdpa:
        return AttentionChoice("sdpa")
    return AttentionChoice(
        "eager", f"{model_class.__name__} needs {_special_attention(architecture)}, which sdpa lacks"
    )


def _special_attention(architecture: PreTrainedConfig) -> str:
    if getattr(architecture, "attn_logit_softcapping", None) is not None:
        return "a soft cap on its attention logits"
    return "attention sinks" if architecture.model_type == "gpt_oss" else "an attention of its own"


def _require_sdpa(architecture: PreTrainedConfig) -> None:
    automatic = _choose_attention(architecture)
    if automatic.implementation != "sdpa":
        raise ModelError(f"model.attn_implementation=sdpa: {automatic.reason}. Use eager or auto.")


def _require_flash(
    name: str, architecture: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> None:
    key = f"model.attn_implementation={name}"
    if device.type != "cuda":
        raise NotApplicableError(
            f"{key} needs a CUDA device, and the model runs on {device}. Use sdpa or auto."
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"{key} runs in bfloat16 or float16 only: set model.dtype, or use sdpa.")
    _require_package(key, name)
    model_class = causal_model_class(architecture)
    if model_class is None:
        return
    compatible = model_class._compatible_flash_implementations
    if not model_class._supports_flash_attn or (compatible is not None and name not in compatible):
        allowed = ["auto", "eager", *(compatible or [])]
        raise ModelError(f"{key}: {model_class.__name__} does not work with it. Use {', '.join(allowed)}.")


def _require_package(key: str, name: str) -> None:
    if name in FLASH_PACKAGES:
        package = FLASH_PACKAGES[name]
        if not package.is_available():
            raise ModelError(
                f"{key} needs the package {package.distribution}, which is not installed. Use sdpa or auto."
            )
    elif importlib.util.find_spec("kernels") is None:
        raise ModelError(
            f"{key} is a kernel on the hub and needs the package kernels, which is not installed."
        )
