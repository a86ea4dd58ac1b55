"""Finds stop strings in the text of a completion as it grows, also across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# Tokens by which the window of text before new tokens grows until it may hold the beginning of a stop string.
WINDOW_STEP = 16
HALF_CHARACTER = "\ufffd"


class FoundStop(NamedTuple):
    """`num_tokens`: tokens of the completion up to the one that completes `string`."""

    num_tokens: int
    string: str


def find_stop_string(
    tokenizer: Any, token_ids: Sequence[int], num_searched: int, strings: Sequence[str]
) -> FoundStop | None:
    """The first stop string that one of the tokens after the first `num_searched` completes; None if there is none.

    Of several that the same token completes, the one that begins first in the text. `tokenizer` is one of
    transformers': special tokens are not part of the text, and a character that is cut across tokens counts once it is
    whole. Only the text around the new tokens is decoded.
    """
    start = _window_start(tokenizer, token_ids, num_searched, max(map(len, strings)))
    # Half a character at the end is not there yet.
    old = len(_decode(tokenizer, token_ids[start:num_searched]).rstrip(HALF_CHARACTER))
    if _first_of(strings, _decode(tokenizer, token_ids[start:]), old) is None:
        return None
    for end in range(num_searched + 1, len(token_ids) + 1):
        found = _first_of(strings, _decode(tokenizer, token_ids[start:end]), old)
        if found is not None:
            return FoundStop(end, found)
    return None


def _window_start(tokenizer: Any, token_ids: Sequence[int], num_searched: int, num_characters: int) -> int:
    """Where to begin: at least `num_characters` are between there and the new tokens.

    They leave out the first of them: at the start of a text a tokenizer may drop a space, or show half a character.
    """
    start = num_searched
    while start > 0:
        start = max(0, start - WINDOW_STEP)
        if len(_decode(tokenizer, token_ids[start + WINDOW_STEP // 2 : num_searched])) >= num_characters:
            break
    return start


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def _first_of(strings: Sequence[str], text: str, num_old: int) -> str | None:
    """The first of `strings` that does not end within the first `num_old` characters of `text`."""
    places = {string: text.find(string, max(0, num_old - len(string) + 1)) for string in strings}
    found = [string for string, place in places.items() if place >= 0]
    return min(found, key=lambda string: (places[string], -len(string)), default=None)
