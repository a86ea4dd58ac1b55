"""Loads a tokenizer, and a model with its adapter onto its device."""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cbexp.config import AdapterConfig, ModelConfig
from cbexp.errors import ModelError
from cbexp.hub import Source, explained_loading
from cbexp.model.adapter import attach_adapter
from cbexp.model.architecture import load_architecture, model_source
from cbexp.model.attention_choice import AttentionChoice, resolve_loaded_attention
from cbexp.model.device import resolve_device, resolve_dtype
from cbexp.model.memory import sum_weights
from cbexp.model.random_model import build_random_model

__all__ = [
    "LoadedModel",
    "describe_model",
    "load_architecture",
    "load_model",
    "load_tokenizer",
    "resolve_device",
    "resolve_dtype",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate: `model` is transformers' or, with an unmerged adapter, PEFT's.

    `generation_eos_ids` are the stop ids of the checkpoint's generation config, or else of its config. An unmerged
    adapter computes in `adapter_dtype`. `load_s` is the time until all weights are on the device.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int
    generation_eos_ids: tuple[int, ...]
    lora_adapter: str | None
    adapter_dtype: torch.dtype | None
    load_s: float

    @property
    def architecture(self) -> PreTrainedConfig:
        """Transformers' config of the model."""
        config: PreTrainedConfig = self.model.config
        return config

    @property
    def special_token_ids(self) -> set[int]:
        """Ids that begin, end or pad a sequence by the model's own configs. Random prompts avoid them."""
        config = self.architecture
        return {i for i in (config.bos_token_id, config.pad_token_id) if i is not None} | {
            *self.generation_eos_ids
        }

    @property
    def vocab_size(self) -> int:
        """Number of token ids, with the padding of the embedding."""
        return int(self.architecture.vocab_size)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer.

    Raises:
        ModelError: there is none, or it cannot be read or reached.
    """
    source = model_source(config)
    with explained_loading(
        Source("tokenizer of model", source.key, source.name, source.revision), ModelError
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=config.trust_remote_code
        )
    # Without tokenizer files, transformers returns an empty tokenizer of the kind that the model's config suggests.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ModelError(
            f"{source} has no tokenizer. Add tokenizer files to it, or use dataset=synthetic, which needs none."
        )
    return tokenizer


def load_model(config: ModelConfig, adapter: AdapterConfig, seed: int) -> LoadedModel:
    """Return the model of `config` with its adapter, in eval mode. Random weights are drawn from `seed`.

    Raises:
        ModelError: the model or adapter cannot be read, reached or run here, or is not supported.
    """
    start_s = time.perf_counter()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    architecture = load_architecture(config)
    attention = resolve_loaded_attention(config.attn_implementation, architecture, device, dtype)
    if config.init == "random":
        model = build_random_model(architecture, device, dtype, attention, seed)
    else:
        model = _load_pretrained(config, architecture, device, dtype, attention)
    attached = attach_adapter(model, adapter, seed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    size = sum_weights(attached.model)
    return LoadedModel(
        model=attached.model,
        device=device,
        dtype=dtype,
        num_parameters=size.num_parameters,
        weight_bytes=size.num_bytes,
        generation_eos_ids=_read_eos_ids(model),
        lora_adapter=attached.description,
        adapter_dtype=attached.dtype,
        load_s=time.perf_counter() - start_s,
    )


def describe_model(config: ModelConfig) -> LoadedModel:
    """Return the model without weights, on the meta device; the rest is as in `load_model`.

    Raises:
        ModelError: the model cannot be read or reached, or is not supported.
    """
    start_s = time.perf_counter()
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    architecture = load_architecture(config)
    auto_class: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(
            copy.deepcopy(architecture), dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    if config.init == "pretrained":
        _read_generation_config(config, model)
    size = sum_weights(model)
    return LoadedModel(
        model=model,
        device=model.device,
        dtype=dtype,
        num_parameters=size.num_parameters,
        weight_bytes=size.num_bytes,
        generation_eos_ids=_read_eos_ids(model),
        lora_adapter=None,
        adapter_dtype=None,
        load_s=time.perf_counter() - start_s,
    )


def _read_generation_config(config: ModelConfig, model: PreTrainedModel) -> None:
    """Take the checkpoint's own generation config, if it has one."""
    source = model_source(config)
    revision: dict[str, Any] = {} if source.revision is None else {"revision": source.revision}
    with suppress(OSError):  # as transformers does when it loads the weights
        model.generation_config = GenerationConfig.from_pretrained(source.name, **revision)


def _load_pretrained(
    config: ModelConfig,
    architecture: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionChoice,
) -> PreTrainedModel:
    source = model_source(config)
    auto_class: Any = AutoModelForCausalLM
    model: PreTrainedModel
    with explained_loading(source, ModelError):
        model, report = auto_class.from_pretrained(
            source.name,
            config=architecture,
            revision=source.revision,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=attention.implementation,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    _check_complete(source, report)
    return model


def _check_complete(source: Source, report: dict[str, Any]) -> None:
    """Refuse a checkpoint without all weights; transformers would fill them at random, with a warning."""
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(f"{source} lacks {len(missing)} of the model's weights: {shown}.")


def _read_eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = model.config.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
