"""Which models the driver takes: unwraps PEFT, and refuses what paged batching would run wrongly."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from cbexp.engine.architecture_support import find_architecture_problem
from cbexp.engine.types import UnsupportedModelError


def require_supported_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model` (a PEFT wrapper is taken off, its adapter layers stay).

    Raises `UnsupportedModelError`, naming the model and the reason, for wrappers, sharded or meta-device models, and
    architectures that the paged cache cannot serve.
    """
    base = _unwrap_peft(model)
    if not isinstance(base, PreTrainedModel):
        raise _unsupported(base, "it is not a transformers model; pass the module inside the wrapper")
    reason = _placement_problem(base) or find_architecture_problem(base.config, type(base))
    if reason is None and not base.can_generate():
        reason = "it has no language-model head; load it with AutoModelForCausalLM"
    if reason is not None:
        raise _unsupported(base, reason)
    return base


def _unsupported(model: Any, reason: str) -> UnsupportedModelError:
    kind = f" (model type {model.config.model_type})" if isinstance(model, PreTrainedModel) else ""
    return UnsupportedModelError(f"{type(model).__name__}{kind} cannot be driven: {reason}.")


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
