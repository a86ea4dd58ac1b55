"""Which models the driver takes: unwraps PEFT, and refuses what paged batching would run wrongly."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from cbexp.engine.types import UnsupportedModelError


def require_supported_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model` (a PEFT wrapper is taken off, its adapter layers stay).

    Raises `UnsupportedModelError`, naming the model and the reason, for wrappers, sharded or meta-device models, and
    architectures that the paged cache cannot serve.
    """
    base = _unwrap_peft(model)
    if not isinstance(base, PreTrainedModel):
        raise _unsupported(base, "it is not a transformers model; pass the module inside the wrapper")
    reason = _placement_problem(base) or _architecture_problem(base)
    if reason is not None:
        raise _unsupported(base, reason)
    return base


def _unsupported(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be driven: {reason}.")


def _unwrap_peft(model: Any) -> Any:
    """The base model, into which PEFT has injected its layers; the wrapper's own forward adds only prompt learning."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
        raise _unsupported(
            model, "prompt-learning adapters change the inputs; LoRA and its kin are supported"
        )
    return model.get_base_model()


def _placement_problem(model: PreTrainedModel) -> str | None:
    if getattr(model, "_device_mesh", None) is not None or (getattr(model, "_tp_size", None) or 1) > 1:
        return "it is tensor-parallel, and only models on one device are supported"
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "its parameters are sharded, and only models on one device are supported"
    placements = set(getattr(model, "hf_device_map", {}).values())
    devices = {parameter.device for parameter in model.parameters()}
    if len(placements) > 1 or len(devices) > 1:
        names = sorted(str(place) for place in (placements if len(placements) > 1 else devices))
        return f"it is spread over {', '.join(names)}, and only models on one device are supported"
    if devices == {torch.device("meta")}:
        return "its weights are on the meta device; load them first"
    return None


def _architecture_problem(model: PreTrainedModel) -> str | None:
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if _is_composite(config):
        return "it takes more than text (its config nests others); load its text model alone"
    if not model.can_generate():
        return "it has no language-model head; load it with AutoModelForCausalLM"
    if model._is_stateful:
        return "its layers keep a recurrent state, which a paged cache cannot hold"
    if not model._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its multi-head latent attention has keys and values of different shapes"
    if config.is_heterogeneous:
        return "its layers differ in shape"
    return None


def _is_composite(config: Any) -> bool:
    if any(key in config.sub_configs for key in ("vision_config", "audio_config")):
        return True
    try:
        return config.get_text_config() is not config
    except ValueError:  # transformers' word for several nested text configs
        return True
