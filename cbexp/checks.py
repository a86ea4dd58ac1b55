"""Checks that settings share, each ending in a `ConfigError` that names the key, the value and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from cbexp.errors import ConfigError


def describe_near_matches(word: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ` Did you mean 'x' or 'y'?` for the names most like `word`, or an empty string when none is alike."""
    near = difflib.get_close_matches(word, list(known), n=limit, cutoff=0.65)
    return f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def check_choice(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        hint = describe_near_matches(value, allowed)
        raise ConfigError(f"{key}={value} is not a choice.{hint} Allowed: {', '.join(allowed)}.")


def check_at_least(key: str, value: float | None, minimum: float) -> None:
    """Raise `ConfigError` when `value` is set and below `minimum`."""
    if value is not None and value < minimum:
        raise ConfigError(f"{key}={value} is too small: it must be at least {minimum}.")


def check_is_set(key: str, value: object, example: str) -> None:
    """Raise `ConfigError` when `value` is None or empty; `example` shows what to write."""
    if value is None or value == "":
        raise ConfigError(f"{key} is not set: {example}.")
