"""Lets the engine say what one of transformers' schedulers may put in its next batch.

Both of transformers' schedulers mix every decoding request into each batch that reads a prompt; here those decode in
bursts, so a batch is either of prompts alone or, under cache pressure, of admitted requests alone.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Literal

Admission = Literal["upstream", "prefill_only", "closed"]


class AdmissionControl:
    """Goes before one of transformers' scheduler classes among the bases of a class.

    No more than `num_slots` requests are admitted in all, forks to come counted. `admission`: "upstream" leaves the
    rest to transformers. "prefill_only" schedules no decoding request, and evicts none while something decodes.
    "closed" admits nothing.
    """

    admission: Admission = "upstream"
    num_slots: int = 0
    _hidden: dict[str, Any]  # decoding requests while they are out of `active_requests`

    # Attributes of transformers' `Scheduler`.
    active_requests: dict[str, Any]
    waiting_requests: dict[str, Any]
    starved_requests: list[tuple[Any, int]]
    block_new_requests: bool

    def reset(self) -> None:
        """Forget every request."""
        super().reset()  # type: ignore[misc]
        self._hidden = {}

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        """As transformers': the batch (None: nothing fits in the cache), a flag, tokens to compute, tokens to read."""
        decoding = self.decoding_requests()
        if self.admission != "prefill_only" or not decoding:
            return self._schedule_upstream(token_budget, cache_budget)
        if not self._try_to_meet_safety_margin():  # type: ignore[attr-defined]
            return [], False, 0, 0
        self._hide(decoding)
        try:
            batch, fast, num_tokens, num_read = self._schedule_upstream(token_budget, cache_budget)
        finally:
            self._show()
            # What did not fit waits for rows to end; nothing is evicted for it.
            self.starved_requests = []
        return batch or [], fast, num_tokens, num_read

    def decoding_requests(self) -> dict[str, Any]:
        """Admitted requests whose prompt is in the cache, in the order of their admission."""
        return {key: state for key, state in self.active_requests.items() if is_decoding(state)}

    def has_prefill_candidates(self) -> bool:
        """Whether a batch of prompts may find something to read: a prompt begun, or one waiting for a free slot."""
        if any(not is_decoding(state) for state in self.active_requests.values()):
            return True
        return bool(self.waiting_requests) and not self.block_new_requests and self._num_free_slots() > 0

    def _get_waiting_candidates(self) -> list[Any]:
        candidates: list[Any] = super()._get_waiting_candidates()  # type: ignore[misc]
        return [] if self.admission == "closed" else self._candidates_with_a_slot(candidates)

    def _candidates_with_a_slot(self, candidates: list[Any]) -> list[Any]:
        """The first of `candidates` that fit in the free slots, but at least one when nothing is admitted."""
        num_free = self._num_free_slots()
        is_idle = not self.active_requests and not self._hidden

        def takes_a_slot(state: Any) -> bool:
            nonlocal num_free, is_idle
            fits = is_idle or _num_slots_of(state) <= num_free
            num_free -= _num_slots_of(state)
            is_idle = False
            return fits

        return list(takewhile(takes_a_slot, candidates))

    def _num_free_slots(self) -> int:
        admitted = [*self._hidden.values(), *self.active_requests.values()]
        return self.num_slots - sum(map(_num_slots_of, admitted))

    def _schedule_upstream(self, token_budget: int, cache_budget: int) -> tuple[Any, bool, int, int]:
        result: tuple[Any, bool, int, int] = super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
        return result

    def _hide(self, decoding: dict[str, Any]) -> None:
        self._hidden = decoding
        self.active_requests = {k: v for k, v in self.active_requests.items() if k not in decoding}

    def _show(self) -> None:
        self.active_requests = self._hidden | self.active_requests
        self._hidden = {}


def is_decoding(state: Any) -> bool:
    """Whether a request of transformers' has its prompt in the cache."""
    return bool(state.status.name == "DECODING")


def _num_slots_of(state: Any) -> int:
    """A request and the forks that it is still to be split into."""
    return 1 + int(state.num_children)
