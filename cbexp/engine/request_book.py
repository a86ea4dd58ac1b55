"""The driver's own record of a drive's requests: times, tokens, outcome, whatever the engine forgets on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cbexp.engine.types import Completion, FinishReason, RequestTimings


@dataclass(frozen=True)
class PromptGroup:
    """A prompt with the ids of its generations and their common limits; `submitted_s` on the perf_counter clock."""

    request_ids: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    submitted_s: float

    @property
    def num_stored_tokens(self) -> int:
        """Tokens that one generation puts in the cache: the last one is returned and never fed back."""
        return len(self.prompt_ids) + self.max_new_tokens - 1


class RequestBook:
    """Requests of one drive in submission order. Times are host times in seconds (perf_counter)."""

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
