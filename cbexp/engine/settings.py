"""Checks of `CBSyncConfig`, and what each decoding setting comes to: request over config over generation config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from cbexp.engine.types import CBSyncConfig, EngineError

SCHEDULERS = ("fifo", "prefill_first")
MIN_PAGE_SIZE = 4  # upstream's bound


@dataclass(frozen=True)
class DecodingSettings:
    """`max_new_tokens` None: each request must bring its own. No EOS ids: requests end at their limit alone."""

    max_new_tokens: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


def check_config(config: CBSyncConfig) -> None:
    """Raise `EngineError` for what this driver does not do yet, `ValueError` for a value that makes no sense."""
    not_yet = {
        "compile_mode": config.compile_mode,
        "cuda_graph": config.cuda_graph,
        "do_sample": config.do_sample,
    }
    for name, value in not_yet.items():
        if value:
            raise EngineError(
                f"{name}={value!r} is not available yet: this driver decodes eagerly and greedily."
            )
    for name, minimum in (("page_size", MIN_PAGE_SIZE), ("max_batch_tokens", 1)):
        _check_at_least(name, getattr(config, name), minimum)
    for name in ("num_blocks", "max_requests_per_batch", "max_new_tokens"):
        if getattr(config, name) is not None:
            _check_at_least(name, getattr(config, name), 1)
    if config.scheduler not in SCHEDULERS:
        raise ValueError(f"scheduler={config.scheduler!r} is not a choice: {', '.join(SCHEDULERS)}.")


def resolve_decoding(
    config: CBSyncConfig, generation_config: GenerationConfig | None, vocab_size: int
) -> DecodingSettings:
    """Settings of `config`, else of `generation_config`, of which nothing but limit, EOS and pad is read."""
    if config.eos_token_id is not None:
        eos_token_ids = _as_ids(config.eos_token_id)
        for token_id in eos_token_ids:
            _check_token_id("eos_token_id", token_id, vocab_size)
    else:
        # Upstream's batching leaves -1 in a config that has no EOS.
        eos_token_ids = tuple(i for i in _as_ids(getattr(generation_config, "eos_token_id", None)) if i >= 0)
    if config.pad_token_id is not None:
        _check_token_id("pad_token_id", config.pad_token_id, vocab_size)
    return DecodingSettings(
        max_new_tokens=_first_set(config, generation_config, "max_new_tokens"),
        eos_token_ids=eos_token_ids,
        pad_token_id=_first_set(config, generation_config, "pad_token_id"),
    )


def _first_set(config: CBSyncConfig, generation_config: GenerationConfig | None, name: str) -> Any:
    value = getattr(config, name)
    return getattr(generation_config, name, None) if value is None else value


def _as_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name}={value} is too small: it must be at least {minimum}.")


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ValueError(f"{name} {token_id!r} is not a token id of this model: 0 to {vocab_size - 1}.")
