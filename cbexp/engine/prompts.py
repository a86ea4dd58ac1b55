"""Checks of what a caller submits, all of it before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RequestLimits:
    """What a request may not exceed. `max_stored_tokens`: what the cache holds of one request, None when it grows."""

    vocab_size: int
    max_positions: int | None
    max_stored_tokens: int | None


def as_plain(value: Any) -> Any:
    """Tensors and NumPy's numbers and arrays as Python's own numbers and lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_is_batch(prompts: object) -> None:
    """Raise `ValueError` unless `prompts` is a collection: of a generator, the length is not known."""
    if not (isinstance(prompts, Sized) and isinstance(prompts, Iterable)):
        raise ValueError(
            f"prompt_ids_list={prompts!r} is a {type(prompts).__name__}: it must be a list of prompts, each a list of "
            "token ids."
        )


def check_prompt(index: int, prompt_ids: object, vocab_size: int) -> tuple[int, ...]:
    """The prompt as a tuple; `ValueError` naming its index unless it is a non-empty sequence of valid token ids."""
    if isinstance(prompt_ids, str) or not isinstance(prompt_ids, Iterable):
        raise ValueError(f"prompts[{index}] is not a sequence of token ids: {prompt_ids!r}.")
    ids = tuple(prompt_ids)
    if not ids:
        raise ValueError(f"prompts[{index}] is empty: a prompt needs at least one token.")
    for position, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise ValueError(
                f"prompts[{index}][{position}] is {token_id!r} ({type(token_id).__name__}): token ids are plain ints."
            )
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"prompts[{index}][{ids.index(bad)}] is {bad}: token ids of this model are 0 to {vocab_size - 1}."
        )
    return ids


def resolve_max_new_tokens(
    asked: int | Sequence[int] | None, default: int | None, num_prompts: int
) -> list[int]:
    """The limit of each prompt: `asked` (one for all or one each), else `default`; `ValueError` when neither is set.

    Tensors and NumPy's arrays are taken like lists, their single numbers like ints.
    """
    wanted = default if asked is None else as_plain(asked)
    if wanted is None:
        raise ValueError(
            "max_new_tokens is set nowhere: pass it to add_requests, in CBSyncConfig or in the generation config."
        )
    if not isinstance(wanted, int) and (isinstance(wanted, str) or not isinstance(wanted, Sequence)):
        raise ValueError(
            f"max_new_tokens={wanted!r} ({type(wanted).__name__}) must be an int of at least 1, or a list of one for "
            "each prompt."
        )
    limits = [wanted] * num_prompts if isinstance(wanted, int) else list(map(as_plain, wanted))
    if len(limits) != num_prompts:
        raise ValueError(f"max_new_tokens has {len(limits)} values for {num_prompts} prompts.")
    for index, limit in enumerate(limits):
        if type(limit) is not int or limit < 1:
            raise ValueError(
                f"max_new_tokens of prompts[{index}] is {limit!r}: it must be an int of at least 1."
            )
    return limits


def check_length(index: int, prompt_length: int, max_new_tokens: int, limits: RequestLimits) -> None:
    """Raise `ValueError` when prompt and new tokens can never fit the model's positions or the cache."""
    wanted = f"prompts[{index}]: {prompt_length} prompt + {max_new_tokens} new tokens"
    total = prompt_length + max_new_tokens
    if limits.max_positions is not None and total > limits.max_positions:
        raise ValueError(
            f"{wanted} = {total} exceed the model's {limits.max_positions} positions (max_position_embeddings): "
            "shorten the prompt or lower max_new_tokens."
        )
    # The last token is returned and never stored.
    if limits.max_stored_tokens is not None and total - 1 > limits.max_stored_tokens:
        raise ValueError(
            f"{wanted} = {total} can never fit the cache, "
            f"which holds {limits.max_stored_tokens} tokens of one request: raise num_blocks."
        )
