"""Which architectures a paged cache and the engine's attention serve, told from config and class, without weights."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig

SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "conv", "recurrent")


def find_architecture_problem(config: PreTrainedConfig, model_class: Any) -> str | None:
    """Why a model of `config` would not run, or run wrongly, on a paged cache; None when nothing speaks against it.

    `model_class` is transformers' class of the model; None, when it is not known, leaves out what only it can tell.
    """
    return (
        _kind_problem(config)
        or _layer_problem(config)
        or _attention_problem(config)
        or (None if model_class is None else _class_problem(model_class))
    )


def _kind_problem(config: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model, and only decoders are served"
    if getattr(config, "is_decoder", True) is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return "it is an encoder, and only decoders are served"
    if _is_composite(config):
        return "it takes more than text (images, audio or video), and only text models are served"
    return None


def _layer_problem(config: PreTrainedConfig) -> str | None:
    if config.is_heterogeneous or getattr(config, "global_head_dim", None) is not None:
        return "its layers differ in shape"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(SUPPORTED_LAYER_TYPES))
    if others:
        state = ", which keep a recurrent state" if set(others) & set(RECURRENT_LAYER_TYPES) else ""
        return (
            "a paged cache serves full and sliding attention only "
            f"(it has layers of the kind {', '.join(others)}{state})"
        )
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers use the keys and values of others"
    return None


def _attention_problem(config: PreTrainedConfig) -> str | None:
    if getattr(config, "kv_lora_rank", None) is not None:
        return "its multi-head latent attention has keys and values of different shapes"
    if getattr(config, "v_head_dim", None) not in (None, getattr(config, "head_dim", None)):
        return "its keys and values differ in head size"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention looks ahead, and only causal attention can go on from a cache"
    return None


def _class_problem(model_class: Any) -> str | None:
    if model_class._is_stateful:
        return "its layers keep a recurrent state, which a paged cache cannot hold"
    if not model_class._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    # The second is the older name, still to be found in code that comes with a checkpoint.
    if not (model_class._supports_flash_attn or getattr(model_class, "_supports_flash_attn_2", False)):
        return "its attention makes masks of its own, which batches of packed sequences do without"
    return None


def _is_composite(config: PreTrainedConfig) -> bool:
    if any(key in config.sub_configs for key in ("vision_config", "audio_config")):
        return True
    try:
        return config.get_text_config() is not config
    except ValueError:  # transformers' word for several nested text configs
        return True
