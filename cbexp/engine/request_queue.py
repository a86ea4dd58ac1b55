"""Prompts that wait for the next drive: checked before any of them is queued, numbered over a driver's life."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cbexp.engine.prompts import (
    RequestLimits,
    as_plain,
    check_is_batch,
    check_length,
    check_prompt,
    resolve_max_new_tokens,
)
from cbexp.engine.request_book import PromptGroup


class RequestQueue:
    """What every driver does with `add_requests`; `default_max_new_tokens` None: each call must bring its own."""

    def __init__(self, default_max_new_tokens: int | None, eos_token_ids: tuple[int, ...]) -> None:
        self._default_max_new_tokens = default_max_new_tokens
        self._eos_token_ids = eos_token_ids
        self._groups: list[PromptGroup] = []
        self._num_requests = 0

    def add(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None,
        num_generations: int,
        limits: RequestLimits,
    ) -> list[str]:
        """Queue prompts; their request ids, the generations of a prompt side by side.

        `max_new_tokens` is one limit or one per prompt. Raises `ValueError`, naming the prompt, for anything that
        cannot be served; nothing is queued then.
        """
        num_generations = as_plain(num_generations)
        if type(num_generations) is not int or num_generations < 1:
            raise ValueError(f"num_generations={num_generations!r} must be an int of at least 1.")
        check_is_batch(prompt_ids_list)
        new_tokens = resolve_max_new_tokens(
            max_new_tokens, self._default_max_new_tokens, len(prompt_ids_list)
        )
        prompts = [check_prompt(i, ids, limits.vocab_size) for i, ids in enumerate(prompt_ids_list)]
        for index, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
            check_length(index, len(prompt), new, limits)
        groups = [self._new_group(p, n, num_generations) for p, n in zip(prompts, new_tokens, strict=True)]
        self._groups += groups
        return [request_id for group in groups for request_id in group.request_ids]

    def take(self) -> list[PromptGroup]:
        """All that is queued, which leaves the queue empty."""
        groups, self._groups = self._groups, []
        return groups

    def _new_group(
        self, prompt_ids: tuple[int, ...], max_new_tokens: int, num_generations: int
    ) -> PromptGroup:
        first = self._num_requests
        self._num_requests += num_generations
        return PromptGroup(
            request_ids=tuple(f"req_{i}" for i in range(first, self._num_requests)),
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            eos_token_ids=self._eos_token_ids,
            submitted_s=time.perf_counter(),
        )
