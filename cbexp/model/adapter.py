"""Attaches a LoRA adapter with PEFT: one from a folder or the hub, or a random one that changes the outputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from cbexp.checks import describe_near_matches
from cbexp.config import AdapterConfig
from cbexp.errors import ModelError
from cbexp.hub import Source, explained_loading, first_line, resolve_source
from cbexp.model.random_model import seeded

# PEFT says that merging may go wrong then, which `_untie_targets` is for, and later that weights are no longer tied.
TIED_WEIGHT_WARNINGS = (
    r"Model (has|with) `tie_word_embeddings=True`|Input and output embeddings are no longer tied"
)
# PEFT's own non-zero initialisation changes a layer's output by about two thirds; this one by about a tenth at rank 16.
RANDOM_LORA_B_STD = 0.02


@dataclass(frozen=True)
class AttachedAdapter:
    """A model with its adapter: a PEFT model, or the base model when there is none or it is merged.

    `dtype` is that of the adapter's weights and products: PEFT keeps them in float32 on a half-precision base. It is
    None without an unmerged adapter.
    """

    model: Any
    description: str | None
    dtype: torch.dtype | None


def attach_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int) -> AttachedAdapter:
    """Return `model` with the adapter of `config`, in eval mode. A random one is drawn from `seed`.

    Raises:
        ModelError: the adapter is missing, unreadable, no LoRA, does not belong to this model, or cannot be merged.
    """
    if config.kind == "none":
        return AttachedAdapter(model, None, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TIED_WEIGHT_WARNINGS)
        return _attach(model, config, seed)


def _attach(model: PreTrainedModel, config: AdapterConfig, seed: int) -> AttachedAdapter:
    if config.path is None:
        adapted = _build_random_adapter(model, config, seed)
        description = (
            f"random, rank {config.rank}, alpha {config.alpha}, on {', '.join(config.target_modules)}"
        )
    else:
        source = resolve_source(Source("adapter", "adapter.path", config.path, config.revision), ModelError)
        adapted = _load_adapter(model, source)
        description = str(source)
    if config.merged:
        return AttachedAdapter(_merge(adapted, description).eval(), f"{description}, merged", None)
    return AttachedAdapter(adapted.eval(), description, _adapter_dtype(adapted))


def _merge(adapted: Any, description: str) -> Any:
    """The base model, with the adapter's product in weights that were loaded for this run."""
    if any(config.trainable_token_indices for config in adapted.peft_config.values()):
        # PEFT loses the tokens' change of a tied head that is adapted as well.
        raise _not_mergeable(description, "it has tokens of its own (trainable_token_indices)")
    _untie_targets(adapted)
    try:
        return adapted.merge_and_unload()
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _not_mergeable(description, first_line(error).rstrip(".")) from error


def _not_mergeable(description: str, reason: str) -> ModelError:
    return ModelError(
        f"The LoRA adapter ({description}) cannot be merged: {reason}. Run it with adapter.merged=false."
    )


def _untie_targets(adapted: Any) -> None:
    """Give each adapted module a weight of its own where it shares one, as a tied head does.

    PEFT would merge into the shared weight, which changes the module that is not adapted as well.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(
        id(parameter) for module in adapted.modules() for parameter in module.parameters(recurse=False)
    )
    for layer in adapted.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        for name, parameter in list(base.named_parameters(recurse=False)):
            if owners[id(parameter)] > 1:
                owners[id(parameter)] -= 1
                own = torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                setattr(base, name, own)


def _build_random_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    _check_target_modules(model, config.target_modules)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.target_modules),
        init_lora_weights=False,
        inference_mode=True,
        task_type="CAUSAL_LM",
    )
    try:
        with seeded(seed, model.device):
            adapted = get_peft_model(model, lora)
            _scale_down(adapted)
    except ValueError as error:
        raise ModelError(f"adapter.target_modules={config.target_modules}: {first_line(error)}") from error
    return adapted


def _check_target_modules(model: PreTrainedModel, targets: list[str]) -> None:
    """Refuse names that match nothing; PEFT ignores them if another name matches."""
    names = [name for name, _ in model.named_modules()]
    last_parts = sorted({name.rpartition(".")[2] for name in names} - {""})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            hint = describe_near_matches(target, [part for part in last_parts if not part.isdecimal()])
            raise ModelError(
                f"adapter.target_modules: {type(model).__name__} has no module {target!r}.{hint}"
            )


def _scale_down(adapted: Any) -> None:
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(std=RANDOM_LORA_B_STD)


def _load_adapter(model: PreTrainedModel, source: Source) -> Any:
    from peft import PeftConfig, PeftType, get_peft_model, load_peft_weights, set_peft_model_state_dict

    with explained_loading(source, ModelError):
        config = PeftConfig.from_pretrained(source.name, revision=source.revision)
        if config.peft_type != PeftType.LORA:
            raise ModelError(f"{source} is of the kind {config.peft_type}, and only LoRA is supported.")
        weights = load_peft_weights(source.name, device=str(model.device), revision=source.revision)
    config = dataclasses.replace(config, inference_mode=True)
    try:
        adapted = get_peft_model(model, config)
        result: Any = set_peft_model_state_dict(adapted, weights)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _wrong_base_error(source, model, config, str(error)) from error
    missing = [name for name in result.missing_keys if "lora_" in name]
    strange = [*missing, *result.unexpected_keys]
    if strange:
        raise _wrong_base_error(
            source, model, config, f"{len(strange)} weights find no match, {strange[0]} for one"
        )
    return adapted


def _wrong_base_error(source: Source, model: PreTrainedModel, config: Any, reason: str) -> ModelError:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    detail = next((line for line in lines if "size mismatch" in line), lines[0])
    base = config.base_model_name_or_path
    made_for = f" (it was made for {base})" if base else ""
    return ModelError(
        f"{source} does not belong to this {type(model).__name__}{made_for}: {detail.rstrip('.')}."
    )


def _adapter_dtype(adapted: Any) -> torch.dtype:
    dtypes: Iterator[torch.dtype] = (p.dtype for name, p in adapted.named_parameters() if "lora_" in name)
    return next(dtypes)
