"""One burst over transformers' decoding requests: how long, in what room, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from cbexp.engine.burst_length import choose_burst_length
from cbexp.engine.cache_state import cache_used_fraction
from cbexp.engine.cb_internals import PagedAttentionCache, RequestState
from cbexp.engine.decode_requests import account_for_tokens, build_rows, remaining_tokens, reserve_room
from cbexp.engine.decoder import Decoder


@dataclass
class BurstStep:
    """A burst over `states`. `finished` grows as tokens are accounted for; `token_ids` has those of each row."""

    states: list[RequestState]
    num_steps: int
    bucket: int
    cache_used_fraction: float
    token_ids: list[list[int]]
    finished: list[RequestState]

    @property
    def num_tokens(self) -> int:
        """Tokens made."""
        return sum(map(len, self.token_ids))

    @property
    def num_padding(self) -> int:
        """Rows computed, over all steps, that made no token."""
        return self.bucket * self.num_steps - self.num_tokens

    def account(self, cache: PagedAttentionCache, scheduler: Any) -> None:
        """Hand the requests their tokens; those that have ended leave the cache."""
        for state, ids in zip(self.states, self.token_ids, strict=True):
            if account_for_tokens(cache, scheduler, state, ids):
                self.finished.append(state)


def run_burst(decoder: Decoder, cache: PagedAttentionCache, scheduler: Any) -> BurstStep | None:
    """Run decode steps of the first requests that decode, their tokens not accounted for yet.

    None when nothing decodes, and when there is no room for one step of all.
    """
    decoding = scheduler.decoding_requests().values()
    states = list(islice(decoding, decoder.settings.shapes.max_rows))
    if not states:
        return None
    # Rows start in order: the longest first, so that none of them is left over at the end of an attention kernel
    # (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    states.sort(key=attrgetter("position_offset"), reverse=True)
    num_others = len(scheduler.waiting_requests) + len(scheduler.active_requests) - len(states)
    num_steps = reserve_room(cache, states, _choose_length(states, num_others, decoder))
    if num_steps == 0:
        return None
    used_fraction = cache_used_fraction(cache)
    burst = decoder.submit(build_rows(cache, states), num_steps)
    return BurstStep(states, num_steps, burst.bucket, used_fraction, decoder.collect(burst), [])


def _choose_length(states: list[RequestState], num_others: int, decoder: Decoder) -> int:
    decode = decoder.settings
    return choose_burst_length(
        [remaining_tokens(state) for state in states],
        decode.shapes,
        max_burst=decode.max_burst,
        has_eos=bool(decode.eos_token_ids),
        is_queue_empty=num_others == 0,
        is_on_cpu=decoder.is_on_cpu,
    )
