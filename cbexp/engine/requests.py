"""Requests on the host: what a caller may submit, the queue before a drive, and the record of one during it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from cbexp.engine.types import Completion, FinishReason, RequestTimings


@dataclass(frozen=True)
class Positions:
    """Tokens that one request of a model may have, prompt and new ones (None: no bound), and where that is from."""

    count: int | None
    source: str

    def __str__(self) -> str:
        return f"the model's {self.count} positions ({self.source})"


@dataclass(frozen=True)
class RequestLimits:
    """What a request may not exceed. `max_stored_tokens`: what the cache holds of one request, None when it grows."""

    vocab_size: int
    positions: Positions
    max_stored_tokens: int | None


class GroupLengths(NamedTuple):
    """A prompt's tokens, the new tokens that each of its generations may have, and their number."""

    prompt_tokens: int
    max_new_tokens: int
    num_generations: int

    @property
    def num_stored_tokens(self) -> int:
        """Tokens that one generation puts in the cache: the last one is returned and never fed back."""
        return self.prompt_tokens + self.max_new_tokens - 1


@dataclass(frozen=True)
class PromptGroup:
    """A prompt with the numbers of its generations and their common limits; `submitted_s` on the perf_counter clock.

    Numbers count the requests of a driver's life.
    """

    numbers: range
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    submitted_s: float

    @property
    def request_ids(self) -> tuple[str, ...]:
        """What callers know the generations by."""
        return tuple(f"req_{number}" for number in self.numbers)

    @property
    def lengths(self) -> GroupLengths:
        """What the group takes of a cache follows from these."""
        return GroupLengths(len(self.prompt_ids), self.max_new_tokens, len(self.numbers))


class RequestQueue:
    """Prompts that wait for the next drive: all checked before any is queued, numbered over a driver's life.

    `default_max_new_tokens` None: each call must bring its own.
    """

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
        """As `RolloutDriver.add_requests`, within `limits`."""
        num_generations = as_plain(num_generations)
        if type(num_generations) is not int or num_generations < 1:
            raise ValueError(f"num_generations={num_generations!r} must be an int of at least 1.")
        _check_is_batch(prompt_ids_list)
        new_tokens = _resolve_max_new_tokens(
            max_new_tokens, self._default_max_new_tokens, len(prompt_ids_list)
        )
        prompts = [_check_prompt(i, ids, limits.vocab_size) for i, ids in enumerate(prompt_ids_list)]
        for index, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
            _check_length(index, len(prompt), new, limits)
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
            numbers=range(first, self._num_requests),
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            eos_token_ids=self._eos_token_ids,
            submitted_s=time.perf_counter(),
        )


class RequestBook:
    """Requests of one drive in submission order: times, tokens, outcome, whatever the engine forgets on the way.

    Times are host times in seconds (perf_counter).
    """

    def __init__(self, groups: Iterable[PromptGroup]) -> None:
        self._groups = {request_id: group for group in groups for request_id in group.request_ids}
        self._scheduled_s: dict[str, float] = {}
        self._first_token_s: dict[str, float] = {}
        self._finished: dict[str, Completion] = {}

    def mark_scheduled(self, request_ids: Iterable[str], time_s: float) -> None:
        """Note the start of each request's first batch; later ones, after an eviction, change nothing."""
        for request_id in request_ids:
            self._scheduled_s.setdefault(request_id, time_s)

    def mark_tokens(self, request_ids: Iterable[str], time_s: float) -> None:
        """Note when each request's first token reached the host."""
        for request_id in request_ids:
            self._first_token_s.setdefault(request_id, time_s)

    def finish(
        self, request_id: str, completion_ids: tuple[int, ...], error: str | None, time_s: float
    ) -> None:
        """Record a request that ended by itself, or that the engine failed with `error`."""
        last_is_eos = bool(completion_ids) and completion_ids[-1] in self._groups[request_id].eos_token_ids
        reason: FinishReason = "failed" if error is not None else "eos" if last_is_eos else "length"
        self._finished[request_id] = self._completion(request_id, completion_ids, reason, error, time_s)

    def completions(self, unfinished: Mapping[str, tuple[int, ...]], error: str) -> dict[str, Completion]:
        """Every request in submission order; those that have not ended are failed with `error`, their tokens kept."""
        return {
            request_id: self._finished[request_id]
            # An empty completion is false in a condition, so membership it is.
            if request_id in self._finished
            else self._completion(request_id, unfinished.get(request_id, ()), "failed", error, None)
            for request_id in self._groups
        }

    def _completion(
        self,
        request_id: str,
        completion_ids: tuple[int, ...],
        reason: FinishReason,
        error: str | None,
        finished_s: float | None,
    ) -> Completion:
        group = self._groups[request_id]
        timings = RequestTimings(
            submitted_s=group.submitted_s,
            scheduled_s=self._scheduled_s.get(request_id),
            first_token_s=self._first_token_s.get(request_id),
            finished_s=finished_s,
        )
        return Completion(request_id, group.prompt_ids, completion_ids, reason, timings, error)


def as_plain(value: Any) -> Any:
    """Tensors and NumPy's numbers and arrays as Python's own numbers and lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _check_is_batch(prompts: object) -> None:
    """Refuse what is no collection: of a generator, the length is not known."""
    if not (isinstance(prompts, Sized) and isinstance(prompts, Iterable)):
        raise ValueError(
            f"prompt_ids_list={prompts!r} is a {type(prompts).__name__}: it must be a list of prompts, each a list of "
            "token ids."
        )


def _check_prompt(index: int, prompt_ids: object, vocab_size: int) -> tuple[int, ...]:
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


def _resolve_max_new_tokens(
    asked: int | Sequence[int] | None, default: int | None, num_prompts: int
) -> list[int]:
    """The limit of each prompt: `asked` (one for all or one each), else `default`."""
    wanted = default if asked is None else as_plain(asked)
    if wanted is None:
        raise ValueError(
            "max_new_tokens is set nowhere: pass it to add_requests, in CBSyncConfig or in a GenerationConfig. The "
            "model's own generation config sets no limit."
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


def _check_length(index: int, prompt_length: int, max_new_tokens: int, limits: RequestLimits) -> None:
    """Refuse what can never fit the model's positions or the cache."""
    wanted = f"prompts[{index}]: {prompt_length} prompt + {max_new_tokens} new tokens"
    total = prompt_length + max_new_tokens
    if limits.positions.count is not None and total > limits.positions.count:
        raise ValueError(
            f"{wanted} = {total} exceed {limits.positions}: shorten the prompt or lower max_new_tokens."
        )
    # The last token is returned and never stored.
    if limits.max_stored_tokens is not None and total - 1 > limits.max_stored_tokens:
        raise ValueError(
            f"{wanted} = {total} can never fit the cache, "
            f"which holds {limits.max_stored_tokens} tokens of one request: raise num_blocks."
        )
