"""What bursts ask of and tell transformers' requests, cache and scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbexp.engine.cb_internals import PagedAttentionCache, RequestState, RequestStatus
from cbexp.engine.buffers import DecodeRow


def remaining_tokens(state: RequestState) -> int:
    """Tokens that the request may still produce; after an eviction its limit counts from there."""
    limit: int = state._new_tokens_limit
    return limit - state.generated_len()


def start_decoding_last_tokens(scheduler: Any) -> None:
    """Make decoding rows of admitted requests whose prompt is cached but for its last token.

    Forks are made in that state, all at once: to upstream they would be a prefill of one token each.
    """
    for state in scheduler.active_requests.values():
        is_left = state.status == RequestStatus.PREFILLING and len(state.remaining_prefill_tokens) == 1
        if is_left and state.num_children == 0:
            state.tokens_to_process, state.remaining_prefill_tokens = state.remaining_prefill_tokens, []
            state.status = RequestStatus.DECODING


def reserve_room(cache: PagedAttentionCache, states: Sequence[RequestState], num_steps: int) -> int:
    """Reserve the blocks of as long a burst as the cache has room for; returns its steps, 0 when it has for none.

    A request takes room for what it may still produce, but for its last token, which is never stored: the first of a
    burst's tokens to be stored is the last of the burst before.
    """
    cache.pool.try_to_free_sectors()
    while num_steps > 0 and not _fits(cache, states, num_steps):
        # Blocks kept for prefix matches are worth less than a longer burst.
        if cache.evict_cached_blocks():
            cache.pool.try_to_free_sectors()
        else:
            num_steps //= 2
    if num_steps > 0:
        for state in states:
            if not cache.can_store_request_tokens(state, _num_fed(state, num_steps)):
                raise RuntimeError(
                    f"transformers' cache has no room for {state.request_id}, though it had said so."
                )
    return num_steps


def build_rows(cache: PagedAttentionCache, states: Sequence[RequestState]) -> list[DecodeRow]:
    """The rows of a batch of decoding requests."""
    tables = {name: allocator.block_table for name, allocator in cache.cache_allocators.items()}
    return [
        DecodeRow(
            token_id=state.tokens_to_process[0],
            position=state.position_offset,
            remaining=remaining_tokens(state),
            blocks={name: table[state.request_id] for name, table in tables.items()},
        )
        for state in states
    ]


def account_for_tokens(
    cache: PagedAttentionCache, scheduler: Any, state: RequestState, token_ids: list[int]
) -> bool:
    """Hand a request the tokens (at least one) that a burst made for it; whether it has ended, and left the cache.

    As many tokens were fed to make them: the one it had, and all but the last of these.
    """
    is_finished = len(token_ids) == remaining_tokens(state) or token_ids[-1] in state._eos_token_ids
    complete_blocks = {} if is_finished else cache.count_new_complete_blocks(state, len(token_ids))
    state.generated_tokens.extend(token_ids)
    state.tokens_to_process = token_ids[-1:]
    state.position_offset += len(token_ids)
    if is_finished:
        state.status = RequestStatus.FINISHED
        scheduler.finish_request(state.request_id)
        scheduler.block_new_requests = False
    else:
        cache.mark_complete_blocks(state, complete_blocks)
    return is_finished


def _fits(cache: PagedAttentionCache, states: Sequence[RequestState], num_steps: int) -> bool:
    needs = [
        {
            name: allocator.needs_new_blocks(
                state.request_id, state.current_len(), _num_fed(state, num_steps)
            )
            for name, allocator in cache.cache_allocators.items()
        }
        for state in states
    ]
    return bool(cache.count_storable_requests(needs) == len(states))


def _num_fed(state: RequestState, num_steps: int) -> int:
    return min(num_steps, remaining_tokens(state))
