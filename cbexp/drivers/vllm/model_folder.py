"""A model's folder for vLLM: that of its weights, or one with only a config.json for random weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from cbexp.config import ModelConfig
from cbexp.errors import ConfigError, ModelError
from cbexp.files import replace_text
from cbexp.hub import explained_loading
from cbexp.model.architecture import causal_model_class, model_source

NAME_LENGTH = 16
# What is fetched from the hub: of the weights, only the first of these formats that there is.
CODE_AND_CONFIG = ("*.json", "*.py", "*.txt", "*.model")
WEIGHT_FORMATS = ("*.safetensors", "*.bin")


def find_model_folder(config: ModelConfig) -> Path:
    """Return the folder of a pretrained model, fetched from the hub if it is not on this machine.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached.
    """
    source = model_source(config)
    if source.is_local:
        return Path(source.name).absolute()
    with explained_loading(source, ModelError):
        for weights in WEIGHT_FORMATS:
            patterns = [*CODE_AND_CONFIG, weights]
            folder = Path(snapshot_download(source.name, revision=source.revision, allow_patterns=patterns))
            if any(folder.glob(weights)):
                break
    return folder


def write_config_folder(
    parent: Path, config: ModelConfig, architecture: PreTrainedConfig, dtype: torch.dtype
) -> Path:
    """Return a folder in `parent` with the config.json of a model with random weights.

    Its name is a digest of its content, since vLLM keeps compiled code by the folder's path.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps(describe_for_vllm(config, architecture, dtype), indent=2, sort_keys=True) + "\n"
    folder = parent / hashlib.sha256(text.encode()).hexdigest()[:NAME_LENGTH]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "config.json", text)
    except OSError as error:
        raise ConfigError(
            f"compile.cache_dir: {folder} cannot be written ({error.strerror}): give another folder."
        ) from error
    return folder


def describe_for_vllm(
    config: ModelConfig, architecture: PreTrainedConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the content of config.json, with rotary settings in a form that all transformers versions read."""
    values: dict[str, Any] = dict(config.architecture)
    rotary = dict(values.pop("rope_parameters", None) or {})
    theta = rotary.pop("rope_theta", None)
    if theta is not None:
        values["rope_theta"] = theta
    if rotary:
        values["rope_scaling"] = None if rotary.get("rope_type", "default") == "default" else rotary
    values["architectures"] = [causal_model_class(architecture).__name__]
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    return values
