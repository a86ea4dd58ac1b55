"""The part of vLLM's `inputs` that the worker uses."""

from typing import TypedDict


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
