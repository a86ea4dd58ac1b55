"""A model's architecture without its weights, read or built from values. Refuses unsupported ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from cbexp.checks import describe_near_matches
from cbexp.config import BUILTIN_PREFIX, ModelConfig
from cbexp.engine.support import find_architecture_problem
from cbexp.errors import ModelError
from cbexp.hub import Source, explained_loading, first_line, resolve_source

BUILTIN_FOLDERS = {
    f"{BUILTIN_PREFIX}{name}": Path(__file__).parents[1] / "assets" / name for name in ("tiny", "tiny_early")
}
# Accepted by transformers' configs beside their fields, and converted into `rope_parameters` and `dtype`.
LEGACY_ARCHITECTURE_KEYS = ("rope_theta", "rope_scaling", "torch_dtype")


def model_source(config: ModelConfig) -> Source:
    """Return the source of the model's files.

    Raises:
        ModelError: there is no such folder, or `name_or_path` is not set.
    """
    name = config.name_or_path
    if name is None:
        raise ModelError(
            f"model.name_or_path is not set, and model={config.name} has to read files (a tokenizer, for one). "
            "Give a hub id or a folder, or use dataset=synthetic with model.init=random."
        )
    folder = BUILTIN_FOLDERS.get(name)
    if config.is_builtin and folder is None:
        raise ModelError(f"model.name_or_path={name} is unknown. Built in: {', '.join(BUILTIN_FOLDERS)}.")
    revision = config.revision
    return resolve_source(Source("model", "model.name_or_path", str(folder or name), revision), ModelError)


def load_architecture(config: ModelConfig) -> PreTrainedConfig:
    """Return transformers' config of the model, from its files or, with `init=random`, from `config.architecture`.

    Raises:
        ModelError: it cannot be read or built, or is not supported (with the reason).
    """
    if config.init == "random":
        architecture = _build_architecture(config.architecture)
    else:
        architecture = _read_architecture(model_source(config), config.trust_remote_code)
    refuse_unsupported(architecture)
    return architecture


def causal_model_class(architecture: PreTrainedConfig) -> Any:
    """Return transformers' causal language model class for `architecture`; None for a repository's own code."""
    if uses_remote_code(architecture):
        return None
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)]


def uses_remote_code(architecture: PreTrainedConfig) -> bool:
    """Whether the class of `architecture` comes from its repository, which takes model.trust_remote_code=true."""
    return type(architecture).__module__.startswith("transformers_modules")


def refuse_unsupported(architecture: PreTrainedConfig) -> None:
    """Raise `ModelError`, with the name and the reason, for a model that paged generation cannot run."""
    if getattr(architecture, "quantization_config", None) is not None:
        reason: str | None = "its checkpoint is quantised; use a bfloat16 or float16 checkpoint of it"
    elif not uses_remote_code(architecture) and type(architecture) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The last reason: the kind of model explains more.
        reason = (
            find_architecture_problem(architecture, None) or "transformers has no causal language model of it"
        )
    else:
        reason = find_architecture_problem(architecture, causal_model_class(architecture))
    if reason is not None:
        raise ModelError(f"model type {architecture.model_type!r} is not supported: {reason}.")


def _read_architecture(source: Source, is_code_trusted: bool) -> PreTrainedConfig:
    with explained_loading(source, ModelError):
        values, _ = PreTrainedConfig.get_config_dict(source.name, revision=source.revision)
        _check_readable(source, values, is_code_trusted)
        architecture: PreTrainedConfig = AutoConfig.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=is_code_trusted
        )
    return architecture


def _check_readable(source: Source, values: dict[str, Any], is_code_trusted: bool) -> None:
    """Refuse with a clear message what `AutoConfig` would refuse, or ask about on the terminal."""
    model_type = values.get("model_type")
    if not values:
        raise ModelError(f"{source} has no config.json, so it is not a transformers model.")
    if model_type in CONFIG_MAPPING or (is_code_trusted and "auto_map" in values):
        return
    if "auto_map" in values:
        raise ModelError(
            f"{source} brings its own model code. Read that code, and set model.trust_remote_code=true to run it."
        )
    if model_type is None:
        raise ModelError(f"{source}: its config.json names no model_type, so it is not a transformers model.")
    raise _unknown_type_error(f"{source} has", model_type)


def _unknown_type_error(subject: str, model_type: Any) -> ModelError:
    hint = describe_near_matches(str(model_type), CONFIG_MAPPING, limit=1)
    return ModelError(
        f"{subject} model_type={model_type!r}, which transformers {transformers.__version__} does not know.{hint}"
    )


def _build_architecture(values: dict[str, Any]) -> PreTrainedConfig:
    values = dict(values)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ModelError("model.architecture has no model_type, as in model.architecture.model_type=qwen3.")
    if model_type not in CONFIG_MAPPING:
        raise _unknown_type_error("model.architecture has", model_type)
    _check_architecture_keys(model_type, values)
    try:
        return AutoConfig.for_model(model_type, **values)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"model.architecture is not a valid {model_type}: {_validation_message(error)}"
        ) from error


def _check_architecture_keys(model_type: str, values: dict[str, Any]) -> None:
    """Refuse keys that the config class would keep and never read."""
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)}
    known.update(config_class.attribute_map, LEGACY_ARCHITECTURE_KEYS)
    for key in values:
        if key not in known:
            hint = describe_near_matches(key, known)
            raise ModelError(f"model.architecture.{key} is not a setting of {model_type}.{hint}")


def _validation_message(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
    return first_line(cause or error)
