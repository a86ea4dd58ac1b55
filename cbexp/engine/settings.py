"""Checks of `CBSyncConfig`, and what each decoding setting comes to: request over config over generation config."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from transformers import GenerationConfig

from cbexp.engine.prompts import as_plain
from cbexp.engine.types import (
    BatchShape,
    CBSyncConfig,
    CompileMode,
    CompileRegion,
    EngineError,
    Fusion,
)

CHOICES: dict[str, tuple[Any, ...]] = {
    "scheduler": ("fifo", "prefill_first"),
    "compile_mode": (None, *get_args(CompileMode)),
    "compile_region": get_args(CompileRegion),
    "batch_shape": get_args(BatchShape),
    "fusion": get_args(Fusion),
}
MIN_PAGE_SIZE = 4  # upstream's bound
# Modes of torch.compile that capture CUDA graphs by themselves, each of a whole forward.
GRAPH_TREE_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class DecodingSettings:
    """`max_new_tokens` None: each request must bring its own. No EOS ids: requests end at their limit alone."""

    max_new_tokens: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


_COMPILE_MODE_HINT = (
    " (Eager is None; captured graphs are cuda_graph=True, with compile_mode None or 'default'.)"
)


_INT_SETTINGS = (
    *("max_new_tokens", "pad_token_id", "page_size", "num_blocks", "max_batch_tokens"),
    *("max_requests_per_batch", "max_burst", "recompile_limit"),
)
_BOOL_SETTINGS = ("do_sample", "cuda_graph", "allow_block_sharing", "self_check")
_SETTINGS_THAT_MAY_BE_NONE = (
    *("max_new_tokens", "pad_token_id", "num_blocks", "max_requests_per_batch", "recompile_limit"),
)
# What the kernels are made and tested for; static buffers hold all of it.
MAX_BUCKET = 1024
MAX_BURST = 4096


def check_config(config: CBSyncConfig) -> None:
    """Raise `EngineError` for what this driver does not do, `ValueError` for a value that makes no sense."""
    _check_types(config)
    if config.do_sample:
        raise EngineError("do_sample=True is not available yet: this driver decodes greedily.")
    for name, minimum in (("page_size", MIN_PAGE_SIZE), ("max_batch_tokens", 1), ("max_burst", 1)):
        _check_at_least(name, getattr(config, name), minimum)
    for name in ("num_blocks", "max_requests_per_batch", "max_new_tokens", "recompile_limit"):
        if getattr(config, name) is not None:
            _check_at_least(name, getattr(config, name), 1)
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            listed = ", ".join(map(repr, choices))
            hint = _COMPILE_MODE_HINT if name == "compile_mode" else ""
            raise ValueError(f"{name}={getattr(config, name)!r} is not a choice: {listed}.{hint}")
    if config.max_burst > MAX_BURST:
        raise ValueError(f"max_burst={config.max_burst} is too large: at most {MAX_BURST} steps.")
    _check_compile(config)
    if config.buckets is not None:
        _check_buckets(config.buckets, config)
    if not config.has_engine_attention:
        _check_without_engine_attention(config)


def check_count(name: str, value: object) -> None:
    """Raise `TypeError` or `ValueError`, by name, unless `value` is an int of at least 1."""
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be a whole number.")
    _check_at_least(name, value, 1)


def check_device(config: CBSyncConfig, device_type: str) -> None:
    """Raise `EngineError` when the settings need CUDA and the model is elsewhere."""
    if device_type == "cuda":
        return
    on_cuda = {
        "cuda_graph=True": config.cuda_graph,
        f"compile_mode={config.compile_mode!r}": config.compile_mode in GRAPH_TREE_MODES,
        "fusion='layers'": config.fusion == "layers",
    }
    for setting, is_set in on_cuda.items():
        if is_set:
            raise EngineError(
                f"{setting} needs a CUDA device, and the model is on {device_type}: compile_mode None, 'default' and "
                "'max-autotune-no-cudagraphs' run there, with fusion 'none' or 'projections'."
            )


def compile_mode_name(config: CBSyncConfig) -> str:
    """The name under which mode and capture together are known: eager, cuda_graph, compiled_cuda_graph, ..."""
    if config.compile_mode is None:
        return "cuda_graph" if config.cuda_graph else "eager"
    return "compiled_cuda_graph" if config.cuda_graph else config.compile_mode.replace("-", "_")


def _check_types(config: CBSyncConfig) -> None:
    """Raise `TypeError`, naming the setting, for a value of another type: "off" would count as true."""
    if not isinstance(config, CBSyncConfig):
        raise TypeError(f"config={config!r} is a {type(config).__name__}: pass a CBSyncConfig.")
    for name in _INT_SETTINGS:
        value = getattr(config, name)
        if type(value) is not int and not (value is None and name in _SETTINGS_THAT_MAY_BE_NONE):
            raise TypeError(f"{name}={value!r} must be a whole number.")
    for name in _BOOL_SETTINGS:
        if type(getattr(config, name)) is not bool:
            raise TypeError(f"{name}={getattr(config, name)!r} must be True or False.")
    buckets = config.buckets
    is_sequence = isinstance(buckets, Sequence) and not isinstance(buckets, str)
    if buckets is not None and not (is_sequence and all(type(b) is int for b in buckets)):
        raise TypeError(f"buckets={buckets!r} must be a list of whole numbers, or None.")
    if config.on_step is not None and not callable(config.on_step):
        raise TypeError(f"on_step={config.on_step!r} must be a function of a step's index and its StepInfo.")


def _check_compile(config: CBSyncConfig) -> None:
    mode = config.compile_mode
    if config.cuda_graph and mode not in (None, "default"):
        raise EngineError(
            f"cuda_graph=True does not go with compile_mode={mode!r}: capture the eager forward (None) or 'default'; "
            f"{' and '.join(map(repr, GRAPH_TREE_MODES))} capture graphs by themselves."
        )
    if config.compile_region == "layer" and (mode is None or mode in GRAPH_TREE_MODES):
        reason = "compiles nothing" if mode is None else "captures graphs of the whole model"
        raise EngineError(
            f"compile_region='layer' does not go with compile_mode={mode!r}, which {reason}: use 'default' or "
            "'max-autotune-no-cudagraphs'."
        )
    if config.recompile_limit is not None and mode is None and config.has_engine_attention:
        raise EngineError(
            f"recompile_limit={config.recompile_limit} is without effect when compile_mode=None, which compiles "
            "nothing: leave it out."
        )


def _check_buckets(buckets: Sequence[int], config: CBSyncConfig) -> None:
    is_ascending = all(a < b for a, b in itertools.pairwise(buckets))
    if not buckets or buckets[0] < 1 or not is_ascending or buckets[-1] > MAX_BUCKET:
        raise ValueError(
            f"buckets={tuple(buckets)} must be batch sizes from 1 to {MAX_BUCKET} in ascending order."
        )
    if config.batch_shape == "natural":
        raise EngineError("buckets are without effect when batch_shape='natural': leave them out.")
    largest = config.max_requests_per_batch
    if largest is not None and largest > buckets[-1]:
        raise ValueError(
            f"buckets end at {buckets[-1]}, and a batch may have max_requests_per_batch={largest} requests: add a "
            "bucket that holds them."
        )


def _check_without_engine_attention(config: CBSyncConfig) -> None:
    idle = {
        f"compile_mode={config.compile_mode!r}": config.compile_mode is not None,
        "cuda_graph=True": config.cuda_graph,
        f"fusion={config.fusion!r}": config.fusion not in ("auto", "none"),
        f"batch_shape={config.batch_shape!r}": config.batch_shape != "buckets",
        f"buckets={config.buckets!r}": config.buckets is not None,
        f"max_burst={config.max_burst}": config.max_burst != CBSyncConfig.max_burst,
        f"recompile_limit={config.recompile_limit}": config.recompile_limit is not None,
        "self_check=False": not config.self_check,
    }
    for setting, is_set in idle.items():
        if is_set:
            raise EngineError(
                f"{setting} works on the engine's own decode steps: it needs attn_implementation='cbexp', "
                f"not {config.attn_implementation!r}."
            )


def resolve_decoding(
    config: CBSyncConfig, generation_config: GenerationConfig | None, vocab_size: int
) -> DecodingSettings:
    """Settings of `config`, else of `generation_config`, of which nothing but limit, EOS and pad is read.

    Raises `TypeError` or `ValueError`, naming the setting, for a value of the generation config that is to count and
    makes no sense. Its pad token may be any number, since nothing reads it and configs with -1 are about.
    """
    if config.eos_token_id is not None:
        eos_token_ids, where = _as_ids(config.eos_token_id), "eos_token_id"
    else:
        ids, where = (
            _as_ids(getattr(generation_config, "eos_token_id", None)),
            "generation_config.eos_token_id",
        )
        # Upstream's batching leaves -1 in a config that has no EOS.
        eos_token_ids = tuple(i for i in ids if i != -1)
    for token_id in eos_token_ids:
        _check_token_id(where, token_id, vocab_size)
    if config.pad_token_id is not None:
        _check_token_id("pad_token_id", config.pad_token_id, vocab_size)
    max_new_tokens = _first_set(config, generation_config, "max_new_tokens")
    if max_new_tokens is not None:
        _check_at_least("generation_config.max_new_tokens", max_new_tokens, 1)
    return DecodingSettings(
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        pad_token_id=_first_set(config, generation_config, "pad_token_id"),
    )


def _first_set(config: CBSyncConfig, generation_config: GenerationConfig | None, name: str) -> int | None:
    """The value of `config`, which has been checked, else that of `generation_config`."""
    own: int | None = getattr(config, name)
    if own is not None:
        return own
    value = as_plain(getattr(generation_config, name, None))
    if value is not None and type(value) is not int:
        raise TypeError(f"generation_config.{name}={value!r} must be a whole number.")
    return value


def _as_ids(value: Any) -> tuple[Any, ...]:
    """The ids in what configs hold: one, several, or a tensor or array of them; they are not checked yet."""
    value = as_plain(value)
    if value is None:
        return ()
    is_one = isinstance(value, str) or not isinstance(value, Iterable)
    return (value,) if is_one else tuple(map(as_plain, value))


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name}={value} is too small: it must be at least {minimum}.")


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ValueError(
            f"{name} {token_id!r} ({type(token_id).__name__}) is not a token id of this model: a plain int, 0 to "
            f"{vocab_size - 1}."
        )
