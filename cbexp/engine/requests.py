"""Requests on the host: what a caller may submit, the queue before a drive, and the record of one during it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cbexp.engine.types import GREEDY, Completion, FinishReason, RequestTimings, Sampling

# Of a completion, in the order of the columns that steps leave behind.
LOGPROB_FIELDS = ("logprobs_model", "logprobs_sampled", "logprobs_raw", "kept_mass")


@dataclass(frozen=True)
class Positions:
    """Tokens that one request of a model may have, prompt and new ones (None: no bound), and where that is from."""

    count: int | None
    source: str

    def __str__(self) -> str:
        return f"the model's {self.count} positions ({self.source})"


@dataclass(frozen=True)
class RequestLimits:
    """What a request may not exceed. `max_stored_tokens`: what the cache holds of one request, None when it grows.

    `reads_text`: whether there is a tokenizer, which stop strings need. `has_own_sampling`: whether a request may be
    sampled otherwise than the driver's settings say.
    """

    vocab_size: int
    positions: Positions
    max_stored_tokens: int | None
    reads_text: bool = False
    has_own_sampling: bool = True


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

    Numbers count the requests of a driver's life. `submission`: which call of `add_requests` brought it, counted over a
    driver's life; `index`: its place in that call. Random numbers depend on both.
    """

    numbers: range
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    submitted_s: float
    sampling: Sampling = GREEDY
    submission: int = 0
    index: int = 0

    @property
    def request_ids(self) -> tuple[str, ...]:
        """What callers know the generations by."""
        return tuple(f"req_{number}" for number in self.numbers)

    @property
    def lengths(self) -> GroupLengths:
        """What the group takes of a cache follows from these."""
        return GroupLengths(len(self.prompt_ids), self.max_new_tokens, len(self.numbers))


class RowTokens(NamedTuple):
    """What a batch or a burst has made of a row: tokens, and the values of `LOGPROB_FIELDS`, float32 [steps, 4].

    None where those are not wanted; there may be more of them than tokens. `is_finite` is False where the row ended
    because its logits were not finite.
    """

    token_ids: list[int]
    logprobs: np.ndarray | None
    is_finite: bool


class RequestQueue:
    """Prompts that wait for the next drive: all checked before any is queued, numbered over a driver's life.

    `default_max_new_tokens` None: each call must bring its own. `num_submissions`: calls that have queued something.
    """

    def __init__(
        self,
        default_max_new_tokens: int | None,
        eos_token_ids: tuple[int, ...],
        default_sampling: Sampling = GREEDY,
    ) -> None:
        self._default_max_new_tokens = default_max_new_tokens
        self._eos_token_ids = eos_token_ids
        self._default_sampling = default_sampling
        self._groups: list[PromptGroup] = []
        self._num_requests = 0
        self.num_submissions = 0

    def add(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None,
        num_generations: int,
        sampling: Sampling | Sequence[Sampling] | None,
        limits: RequestLimits,
    ) -> list[str]:
        """As `RolloutDriver.add_requests`, within `limits`."""
        num_generations = as_plain(num_generations)
        if type(num_generations) is not int or num_generations < 1:
            raise ValueError(f"num_generations={num_generations!r} must be an int of at least 1.")
        check_batch("prompt_ids_list", prompt_ids_list)
        new_tokens = _resolve_max_new_tokens(
            max_new_tokens, self._default_max_new_tokens, len(prompt_ids_list)
        )
        prompts = [check_prompt(i, ids, limits.vocab_size) for i, ids in enumerate(prompt_ids_list)]
        samplings = _resolve_sampling(sampling, self._default_sampling, len(prompts))
        for index, (prompt, new, own) in enumerate(zip(prompts, new_tokens, samplings, strict=True)):
            _check_length(index, len(prompt), new, limits)
            if own is not self._default_sampling:
                if not limits.has_own_sampling:
                    raise ValueError(
                        f"sampling of prompts[{index}]: this driver samples all its requests by its own settings."
                    )
                check_sampling(f"sampling of prompts[{index}]", own, limits.vocab_size, limits.reads_text)
            if own.min_new_tokens > new:
                raise ValueError(
                    f"prompts[{index}]: min_new_tokens={own.min_new_tokens} is more than max_new_tokens={new}."
                )
        if not prompts:
            return []
        groups = []
        for index, (prompt, new, own) in enumerate(zip(prompts, new_tokens, samplings, strict=True)):
            first, self._num_requests = self._num_requests, self._num_requests + num_generations
            groups.append(
                PromptGroup(
                    numbers=range(first, self._num_requests),
                    prompt_ids=prompt,
                    max_new_tokens=new,
                    eos_token_ids=self._eos_token_ids,
                    submitted_s=time.perf_counter(),
                    sampling=own,
                    submission=self.num_submissions,
                    index=index,
                )
            )
        self.num_submissions += 1
        self._groups += groups
        return [request_id for group in groups for request_id in group.request_ids]

    def take(self) -> list[PromptGroup]:
        """All that is queued, which leaves the queue empty."""
        groups, self._groups = self._groups, []
        return groups


class RequestBook:
    """Requests of one drive in submission order: times, tokens, outcome, whatever the engine forgets on the way.

    Times are host times in seconds (perf_counter). `version`: the policy that makes tokens now.
    """

    def __init__(self, groups: Iterable[PromptGroup], version: int = 0) -> None:
        self._groups = {request_id: group for group in groups for request_id in group.request_ids}
        self.version = version
        self._scheduled_s: dict[str, float] = {}
        self._first_token_s: dict[str, float] = {}
        self._logprobs: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        self._columns: dict[str, Mapping[str, tuple[float, ...]]] = {}
        self._versions: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._finished: dict[str, Completion] = {}

    def group_of(self, request_id: str) -> PromptGroup:
        """The prompt that it is a completion of."""
        return self._groups[request_id]

    def mark_scheduled(self, request_ids: Iterable[str], time_s: float) -> None:
        """Note the start of each request's first batch; later ones, after an eviction, change nothing."""
        for request_id in request_ids:
            self._scheduled_s.setdefault(request_id, time_s)

    def mark_tokens(self, request_ids: Iterable[str], time_s: float) -> None:
        """Note when each request's first token reached the host."""
        for request_id in request_ids:
            self._first_token_s.setdefault(request_id, time_s)

    def add_tokens(
        self, request_id: str, num_tokens: int, logprobs: np.ndarray | None, time_s: float
    ) -> None:
        """Note tokens of a request that have reached the host; `logprobs` as in `RowTokens`."""
        if num_tokens == 0:
            return
        self.mark_tokens([request_id], time_s)
        if logprobs is not None:
            self._logprobs[request_id].append(logprobs[:num_tokens])
        runs = self._versions[request_id]
        if runs and runs[-1][0] == self.version:
            num_tokens += runs.pop()[1]
        runs.append((self.version, num_tokens))

    def set_logprobs(self, request_id: str, columns: Mapping[str, tuple[float, ...]]) -> None:
        """Note all log-probabilities of a request, by `LOGPROB_FIELDS`; for drivers that have not each of them."""
        self._columns[request_id] = columns

    def finish(
        self,
        request_id: str,
        completion_ids: tuple[int, ...],
        error: str | None,
        time_s: float,
        stop_string: str | None = None,
    ) -> None:
        """Record a request that ended by itself, by a stop string, or that the engine failed with `error`."""
        group, last = self._groups[request_id], completion_ids[-1] if completion_ids else None
        reason: FinishReason = "length"
        stop_reason: int | str | None = None
        if error is not None:
            reason = "failed"
        elif last in group.eos_token_ids:
            reason = "eos"
        elif last in group.sampling.stop_token_ids:
            reason, stop_reason = "stop", last
        elif stop_string is not None:
            reason, stop_reason = "stop", stop_string
        self._finished[request_id] = self._completion(
            request_id, completion_ids, reason, error, time_s, stop_reason
        )

    def is_finished(self, request_id: str) -> bool:
        """Whether its end was recorded."""
        return request_id in self._finished

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
        stop_reason: int | str | None = None,
    ) -> Completion:
        group, num_tokens = self._groups[request_id], len(completion_ids)
        timings = RequestTimings(
            submitted_s=group.submitted_s,
            scheduled_s=self._scheduled_s.get(request_id),
            first_token_s=self._first_token_s.get(request_id),
            finished_s=finished_s,
        )
        parts = self._logprobs[request_id] or [np.empty((0, len(LOGPROB_FIELDS)), np.float32)]
        columns = map(tuple, np.concatenate(parts)[:num_tokens].T.tolist())
        return Completion(
            request_id,
            group.prompt_ids,
            completion_ids,
            reason,
            timings,
            error,
            stop_reason,
            **{**dict(zip(LOGPROB_FIELDS, columns, strict=True)), **self._columns.get(request_id, {})},
            versions=_first_runs(self._versions[request_id], num_tokens),
        )


def _first_runs(runs: Iterable[tuple[int, int]], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """The runs of the first `num_tokens`: a stop string is found after the tokens behind it were made."""
    kept = []
    for version, count in runs:
        if num_tokens > 0:
            kept.append((version, min(count, num_tokens)))
        num_tokens -= count
    return tuple(kept)


def as_plain(value: Any) -> Any:
    """Tensors and NumPy's numbers and arrays as Python's own numbers and lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_batch(name: str, prompts: object) -> None:
    """Refuse what is no collection: of a generator, the length is not known."""
    if not (isinstance(prompts, Sized) and isinstance(prompts, Iterable)):
        raise ValueError(
            f"{name}={prompts!r} is a {type(prompts).__name__}: it must be a list of lists of token ids."
        )


def check_prompt(index: int, prompt_ids: object, vocab_size: int) -> tuple[int, ...]:
    """The ids of a prompt, of which there must be one; raises `ValueError`."""
    ids = check_token_ids(f"prompts[{index}]", prompt_ids, vocab_size)
    if not ids:
        raise ValueError(f"prompts[{index}] is empty: a prompt needs at least one token.")
    return ids


def check_token_ids(name: str, token_ids: object, vocab_size: int) -> tuple[int, ...]:
    """The ids, plain and of the vocabulary; raises `ValueError`."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise ValueError(f"{name} is not a sequence of token ids: {token_ids!r}.")
    ids = tuple(token_ids)
    for position, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise ValueError(
                f"{name}[{position}] is {token_id!r} ({type(token_id).__name__}): token ids are plain ints."
            )
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"{name}[{ids.index(bad)}] is {bad}: token ids of this model are 0 to {vocab_size - 1}."
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


def _resolve_sampling(
    asked: Sampling | Sequence[Sampling] | None, default: Sampling, num_prompts: int
) -> list[Sampling]:
    """How each prompt is sampled: `asked` (one for all or one each), else `default`."""
    if asked is None or isinstance(asked, Sampling):
        return [asked or default] * num_prompts
    if not isinstance(asked, Sequence):
        raise ValueError(
            f"sampling={asked!r} ({type(asked).__name__}) must be a Sampling, or a list of one a prompt."
        )
    if len(asked) != num_prompts:
        raise ValueError(f"sampling has {len(asked)} values for {num_prompts} prompts.")
    return list(asked)


def check_sampling(where: str, sampling: Sampling, vocab_size: int, reads_text: bool) -> None:
    """Raise `ValueError` for what cannot be sampled so, naming the field and `where` it is from."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"{where} is {sampling!r} ({type(sampling).__name__}): it must be a Sampling.")
    for name, (is_right, expected) in _SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        if not is_right(value):
            raise ValueError(f"{where}: {name}={value!r} must be {expected}.")
    for name in ("stop_token_ids", "suppress_token_ids"):
        for token_id in getattr(sampling, name):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{where}: {name} has {token_id}, and token ids of this model are 0 to {vocab_size - 1}."
                )
    if len(set(sampling.suppress_token_ids)) == vocab_size:
        raise ValueError(f"{where}: suppress_token_ids leave no token of the vocabulary.")
    if sampling.stop_strings and not reads_text:
        raise ValueError(
            f"{where}: stop_strings need the tokenizer: SyncCBDriver(model, ..., tokenizer=tokenizer)."
        )


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(i) is int for i in value)


def _are_strings(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(text, str) and text for text in value)


_MAX_FLOAT = 3e38  # settings reach the device as float32
# Field of `Sampling` -> whether a value is right, and what it must be.
_SAMPLING_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: _is_number(value, 0, _MAX_FLOAT), "a number of at least 0 (0: greedy)"),
    "top_k": (
        lambda value: type(value) is int and -1 <= value < 2**31,
        "a whole number of at least 1 (0 and -1: off)",
    ),
    "top_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1 (1: off)"),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1 (0: off)"),
    "repetition_penalty": (
        lambda value: _is_number(value, 1 / _MAX_FLOAT, _MAX_FLOAT),
        "a number above 0 (1: off)",
    ),
    "min_new_tokens": (
        lambda value: type(value) is int and 0 <= value < 2**31,
        "a whole number of at least 0",
    ),
    "stop_token_ids": (_are_ids, "a list of token ids"),
    "stop_strings": (_are_strings, "a list of strings that are not empty"),
    "suppress_token_ids": (_are_ids, "a list of token ids"),
}
