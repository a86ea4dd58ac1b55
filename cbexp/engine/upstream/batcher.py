"""Serves requests on one paged cache of transformers': its batches, and rows for bursts of decode steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
)

from cbexp.engine.buffers import NOT_FINITE, DecodeRow, PagePool, RowSampling
from cbexp.engine.forward import Forward
from cbexp.engine.requests import PromptGroup, RequestBook, RowTokens
from cbexp.engine.row_sampling import DriveSampling
from cbexp.engine.sampling import HeadInputs, choose
from cbexp.engine.scoring import ScoredGroup
from cbexp.engine.stop_strings import FoundStop, find_stop_string
from cbexp.engine.support import read_positions
from cbexp.engine.types import CBSyncConfig, Scores, StepInfo, StepKind
from cbexp.engine.upstream.admission import Admission
from cbexp.engine.upstream.build import (
    PagedCache,
    build_page_pools,
    build_processor,
    build_request_state,
    child_id,
    describe_processor,
    generated_ids,
    max_request_tokens,
    on_cpu_by_default,
)
from cbexp.engine.upstream.scoring import Scorer


class RunsPrompts(Protocol):
    """Who runs the batches that transformers has put together."""

    def timing_batch(self) -> AbstractContextManager[None]:
        """Around a batch's forward."""

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor | HeadInputs:
        """Logits [num_rows, vocab_size] of transformers' packed batch, or what the head makes them of."""


@dataclass(frozen=True)
class BurstRows:
    """Requests that decode in a burst of `num_steps`, with room reserved for it; `states` are upstream's."""

    states: list[RequestState]
    rows: list[DecodeRow]
    num_steps: int
    cache_used_fraction: float


class Batcher:
    """Transformers' processor with its cache, stepped by the caller and reused over drives.

    A request lives in one drive, between `begin` and `reset`, and the cache is empty outside of one. Everything runs
    inside `on_stream`. `num_blocks`, `cache_bytes` and `max_request_tokens` (what an empty cache holds of one request;
    None: no limit) stay as they are.
    """

    def __init__(self, model: PreTrainedModel, settings: CBSyncConfig, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs, self._fp32_head = settings.logprobs, settings.fp32_head
        self._sampling = DriveSampling((), seed=0, vocab_size=1)
        self._device, self._dtype = model.device, model.dtype
        self._processor = build_processor(model, settings)
        self._cache = cast(PagedCache, self._processor.cache)
        self._scheduler: Any = self._processor.scheduler  # with AdmissionControl
        # One set of buffers, since the processor is built without async batching.
        self._inputs = cast(ContinuousBatchingIOs, self._processor.inputs_and_outputs)
        self._outputs = self._processor.output_router.output_queue
        self._caller_ids: dict[str, str] = {}
        self._last_burst: list[RequestState] = []
        self._book = RequestBook(())
        self._described = describe_processor(self._processor)
        self.num_blocks = int(self._cache.num_blocks)
        self.cache_bytes = int(self._described["cache_bytes"])
        self.max_request_tokens = max_request_tokens(self._cache)
        self._positions = read_positions(model.config)
        self.max_positions: int = self._positions.count or self._cache.max_tokens_read

    def describe(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values."""
        return dict(self._described)

    def suits(self, model: PreTrainedModel) -> bool:
        """Whether the cache is where the model is now, in its dtype, and tables are as long as its positions."""
        now = model.device, model.dtype, read_positions(model.config)
        return now == (self._device, self._dtype, self._positions)

    def page_pools(self) -> dict[str, PagePool]:
        """Attention type -> where its keys and values live."""
        return build_page_pools(self._cache, self.max_positions)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the body on upstream's stream, after the caller's (new weights) and before whatever follows it.

        There, new tensors are on the CPU by default, whatever the caller's own default is.

        Upstream writes a batch's inputs on the current stream and reads them on its own with no event between the two.
        """
        stream = self._inputs.compute_stream
        if stream is None:  # no CUDA: there is one order anyway
            with on_cpu_by_default():
                yield
            return
        callers_stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(callers_stream)
        try:
            with torch.cuda.stream(stream), on_cpu_by_default():
                yield
        finally:
            callers_stream.wait_stream(stream)

    def begin(self, book: RequestBook, sampling: DriveSampling, safety_margin: float, num_slots: int) -> None:
        """Start a drive whose requests are recorded in `book`, and chosen by `sampling`.

        `safety_margin`: share of the cache, in [0, 1], to keep free of new prompts so that admitted requests can grow.
        `num_slots`: most requests that decode at once.
        """
        self._book, self._sampling = book, sampling
        self._scheduler.num_slots = num_slots
        self._scheduler.safety_margin = self._described["safety_margin"] = safety_margin

    def submit(self, group: PromptGroup) -> None:
        """Queue a prompt; its generations beyond the first are forked from it once its prompt is in the cache."""
        parent_id, *child_ids = group.request_ids
        # A prompt takes the slots of all its generations at once.
        self._scheduler.num_slots = max(self._scheduler.num_slots, len(group.numbers))
        self._caller_ids[parent_id] = parent_id
        self._caller_ids.update((child_id(parent_id, i), caller_id) for i, caller_id in enumerate(child_ids))
        self._scheduler.add_waiting_request(build_request_state(group))

    def run_prefill(self, runner: RunsPrompts, start_s: float) -> StepInfo | None:
        """Run a batch of prompts alone; None when none is there, or none has a slot and room."""
        self._start_decoding_last_tokens()
        if not self._scheduler.has_prefill_candidates():
            return None
        return self.run_batch(runner, "prefill_only", start_s)

    def run_batch(self, runner: RunsPrompts, admission: Admission, start_s: float) -> StepInfo | None:
        """Run one batch of transformers' own and record what came of it; None when there is nothing to run."""
        self._scheduler.admission = admission
        if not self._processor.prepare_next_batch():
            return None
        batch: list[FutureRequestState] = list(self._inputs.requests_in_batch)
        kind, used_fraction = _step_kind(batch), self.cache_used_fraction
        states = [future.state for future in batch if future.has_new_token]
        with runner.timing_batch():
            logprobs = self._run_forward(runner, states)
        made = self._read_made_tokens(len(states), logprobs)
        self._make_room_for_forks()
        self._processor.update_batch()
        end_s = time.perf_counter()
        self._book.mark_scheduled(self._to_caller_ids(f.state for f in batch), start_s)
        num_ended = sum(self._end_early(state, row, end_s) for state, row in zip(states, made, strict=True))
        return StepInfo(
            kind=kind,
            num_steps=1,
            num_requests=len(batch),
            num_tokens=self._inputs.num_q_tokens,
            num_padding=0,
            bucket=None,
            start_s=start_s,
            end_s=end_s,
            num_waiting=len(self._scheduler.waiting_requests),
            num_finished=num_ended + self._record_outputs(end_s),
            cache_used_fraction=used_fraction,
        )

    def score(
        self,
        groups: Sequence[ScoredGroup],
        forward: Forward,
        temperature: float,
        safety_margin: float,
        num_slots: int,
    ) -> dict[int, Scores]:
        """Scores of the groups' completions by their places in the call; to be followed by `reset`, as a drive is.

        `safety_margin` and `num_slots` as in `begin`.
        """
        self._scheduler.num_slots = num_slots
        self._scheduler.safety_margin = safety_margin
        return Scorer(self._processor, forward, temperature, fp32_head=self._fp32_head).run(groups)

    def open_burst(self, max_rows: int, choose_length: Callable[[list[int], bool], int]) -> BurstRows | None:
        """Choose and reserve a burst over the first `max_rows` requests that decode.

        `choose_length` has its steps from the tokens that each row may still produce, and whether no other request is
        left. None when nothing decodes, and when there is no room for one step of all.
        """
        states = list(islice(self._scheduler.decoding_requests().values(), max_rows))
        if not states:
            return None
        # Rows start in order: the longest first, so that none of them is left over at the end of an attention kernel
        # (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
        states.sort(key=attrgetter("position_offset"), reverse=True)
        num_known = len(self._scheduler.waiting_requests) + len(self._scheduler.active_requests)
        remaining = [_remaining_tokens(state) for state in states]
        num_steps = self._reserve_room(states, choose_length(remaining, num_known == len(states)))
        if num_steps == 0:
            return None
        return BurstRows(states, self._build_rows(states), num_steps, self.cache_used_fraction)

    def close_burst(
        self, burst: BurstRows, made: Sequence[RowTokens], bucket: int, start_s: float
    ) -> StepInfo:
        """Hand the requests the tokens that each row has made; those that have ended leave the cache."""
        self._last_burst = burst.states
        self._book.mark_scheduled(self._to_caller_ids(burst.states), start_s)
        end_s = time.perf_counter()
        num_finished = sum(
            self._account_for_tokens(state, row, end_s) for state, row in zip(burst.states, made, strict=True)
        )
        num_tokens = sum(len(row.token_ids) for row in made)
        return StepInfo(
            kind="decode",
            num_steps=burst.num_steps,
            num_requests=len(burst.states),
            num_tokens=num_tokens,
            num_padding=bucket * burst.num_steps - num_tokens,
            bucket=bucket,
            start_s=start_s,
            end_s=end_s,
            num_waiting=len(self._scheduler.waiting_requests),
            num_finished=num_finished + self._record_outputs(end_s),
            cache_used_fraction=burst.cache_used_fraction,
        )

    @property
    def cache_used_fraction(self) -> float:
        """Share of the cache that requests reference, in [0, 1]; blocks kept for prefix matches count as free."""
        cache = self._cache
        kept_bytes = sum(
            len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
            for allocator in cache.cache_allocators.values()
        )
        total_bytes = cache.num_sectors * cache.bytes_per_sector
        free_bytes = cache.compute_free_capacity(relative=False)
        return float((total_bytes - free_bytes - kept_bytes) / total_bytes)

    def partial_completions(self) -> dict[str, tuple[int, ...]]:
        """Request id -> tokens so far, of every request that is queued, running, or in the batch of the last step."""
        in_batch = [*(future.state for future in self._inputs.requests_in_batch), *self._last_burst]
        queued = [*self._scheduler.active_requests.values(), *self._scheduler.waiting_requests.values()]
        return {self._caller_ids[state.request_id]: generated_ids(state) for state in [*in_batch, *queued]}

    def reset(self) -> None:
        """Forget every request and free every block, whatever an interrupted step has left behind.

        Blocks kept for prefix matches go too, since the weights may change before the next drive. The device must have
        been waited for.
        """
        for _ in range(self._outputs.qsize()):
            self._outputs.get_nowait()
        self._caller_ids.clear()
        self._book = RequestBook(())
        self._inputs.requests_in_batch = []
        self._last_burst = []
        self._processor.offloading_manager.reset()
        self._scheduler.reset()
        self._free_blocks()

    def _free_blocks(self) -> None:
        for allocator in self._cache.cache_allocators.values():
            allocator.block_table.clear()
            allocator.ledger.reset()
        self._cache.pool.reset()

    def wait_for_device(self) -> None:
        """Wait for all that was put on the stream."""
        if self._inputs.compute_stream is not None:
            self._inputs.compute_stream.synchronize()

    @property
    def held_bytes(self) -> int:
        """Bytes that the cache has of the device now."""
        return self.cache_bytes if self._cache.memory.is_held else 0

    def give_up_memory(self) -> None:
        """Let others have the cache's memory until `take_memory_back`; outside of a drive. Harmless when it is done."""
        if self._cache.memory.is_held:
            self._cache.memory.give_up()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # of what this stream has used and PyTorch keeps, others would get nothing

    def take_memory_back(self) -> None:
        """Have an empty cache again, where it was; harmless when it is there. Raises `CacheMemoryError`."""
        if not self._cache.memory.is_held:
            self._cache.memory.take_back()
            with self.on_stream():
                self._cache.clear()

    def close(self) -> None:
        """Give the cache's memory back to the device, which must have been waited for; unusable afterwards."""
        del self._processor, self._scheduler, self._cache, self._inputs
        if self._device.type == "cuda":
            _free_workspaces()
            torch.cuda.empty_cache()

    def _start_decoding_last_tokens(self) -> None:
        """Make decoding rows of admitted requests whose prompt is cached but for its last token.

        Forks are made in that state, all at once: to upstream they would be a prefill of one token each.
        """
        for state in self._scheduler.active_requests.values():
            is_left = state.status == RequestStatus.PREFILLING and len(state.remaining_prefill_tokens) == 1
            if is_left and state.num_children == 0:
                state.tokens_to_process, state.remaining_prefill_tokens = state.remaining_prefill_tokens, []
                state.status = RequestStatus.DECODING

    def _run_forward(self, runner: RunsPrompts, states: Sequence[RequestState]) -> np.ndarray | None:
        """Run the prepared batch, of which some rows may have no token; `states` get one, in the order of its rows.

        Returns their log-probabilities, if they are wanted.

        A parent keeps its last prompt token for its forks. With a one-token prompt, or after a prefix match, that
        leaves it nothing to run; a batch of such parents has no forward.
        """
        inputs = self._inputs
        num_tokens, num_rows = inputs.num_q_tokens, inputs.num_request_in_batch
        if num_tokens == 0:
            return None
        if num_rows > num_tokens:
            # Upstream clears one index a token and reads one a row: an older batch's would point beyond this one.
            inputs.logits_indices[num_tokens:num_rows].zero_()
        logits = runner.prefill(cast(dict[str, Any], inputs.get_model_kwargs()), num_rows)
        if not self._sampling.needs_sampling:
            best_ids, best_logits = choose(logits)
            inputs.output_ids[0, :num_rows].copy_(torch.where(best_logits.isfinite(), best_ids, NOT_FINITE))
            inputs.retrieve_device_outputs()
            return None
        if not states:
            return None
        rows = [self._row_sampling(state) for state in states]
        # Of the batch as it was prepared: its tokens are counted.
        next_ids, logprobs = self._sampling.choose(logits, rows, [s.position_offset - 1 for s in states])
        inputs.output_ids[0, : len(rows)].copy_(next_ids)
        inputs.retrieve_device_outputs()
        return logprobs.cpu().numpy() if self._wants_logprobs else None

    def _row_sampling(self, state: RequestState) -> RowSampling:
        caller_id = self._caller_ids[state.request_id]
        group, settings = self._book.group_of(caller_id), self._sampling.settings_of(caller_id)
        if group.sampling.repetition_penalty == 1:
            return RowSampling(settings)
        return RowSampling(settings, (*group.prompt_ids, *generated_ids(state)))

    def _read_made_tokens(self, num_rows: int, logprobs: np.ndarray | None) -> list[RowTokens]:
        """What the batch that has run has made of each request that gets a token."""
        token_ids = self._inputs.output_ids[0, :num_rows].tolist()
        return [
            RowTokens(
                [] if token_id == NOT_FINITE else [token_id],
                None if logprobs is None else logprobs[row : row + 1],
                token_id != NOT_FINITE,
            )
            for row, token_id in enumerate(token_ids)
        ]

    def _end_early(self, state: RequestState, made: RowTokens, end_s: float) -> bool:
        """Note the token that transformers' own step has handed to a request; whether that ended it, unseen there."""
        caller_id = self._caller_ids[state.request_id]
        self._book.add_tokens(caller_id, len(made.token_ids), made.logprobs, end_s)
        if not made.is_finite:
            state.generated_tokens.pop()  # the mark
        stop = self._find_stop(caller_id, state, made.token_ids, is_known=True)
        if made.is_finite and stop is None:
            return False
        was_delivered = state.status == RequestStatus.FINISHED
        self._leave(state)
        self._finish(caller_id, generated_ids(state), made.is_finite, stop, end_s)
        return not was_delivered

    def _record_outputs(self, end_s: float) -> int:
        """Record requests that transformers' own steps have ended or failed; returns their number."""
        num_outputs = self._outputs.qsize()
        for _ in range(num_outputs):
            output = self._outputs.get_nowait()
            request_id = self._caller_ids[output.request_id]
            if not self._book.is_finished(request_id):
                self._book.finish(request_id, tuple(output.generated_tokens), output.error, end_s)
        return num_outputs

    def _make_room_for_forks(self) -> None:
        """Forks that find no room go back to the queue: blocks kept for prefix matches are worth less than that."""
        allocators, cache = self._cache.cache_allocators, self._cache
        needs = [
            {
                name: allocator.count_non_shareable_blocks(state.request_id, state.current_len())
                for name, allocator in allocators.items()
            }
            for state in self._scheduler._requests_to_fork
            for _ in range(state.num_children)
        ]
        if needs:
            cache.pool.try_to_free_sectors()
            if cache.count_storable_requests(needs) < len(needs):
                cache.evict_cached_blocks()

    def _reserve_room(self, states: Sequence[RequestState], num_steps: int) -> int:
        """Reserve the blocks of as long a burst as the cache has room for; returns its steps, 0 when it has for none.

        A burst stores the tokens that it is fed: the one that each request had before, and all but the last of those
        that it makes.
        """
        cache = self._cache
        cache.pool.try_to_free_sectors()
        while num_steps > 0 and not self._fits(states, num_steps):
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

    def _fits(self, states: Sequence[RequestState], num_steps: int) -> bool:
        needs = [
            {
                name: allocator.needs_new_blocks(
                    state.request_id, state.current_len(), _num_fed(state, num_steps)
                )
                for name, allocator in self._cache.cache_allocators.items()
            }
            for state in states
        ]
        return bool(self._cache.count_storable_requests(needs) == len(states))

    def _build_rows(self, states: Sequence[RequestState]) -> list[DecodeRow]:
        tables = {name: allocator.block_table for name, allocator in self._cache.cache_allocators.items()}
        return [
            DecodeRow(
                token_id=state.tokens_to_process[0],
                position=state.position_offset,
                remaining=_remaining_tokens(state),
                sampling=self._row_sampling(state) if self._sampling.needs_sampling else None,
                blocks={name: table[state.request_id] for name, table in tables.items()},
            )
            for state in states
        ]

    def _account_for_tokens(self, state: RequestState, made: RowTokens, end_s: float) -> bool:
        """Hand a request its tokens; whether it has ended, and left the cache.

        As many tokens were fed to make them: the one it had, and all but the last of these.
        """
        caller_id, token_ids = self._caller_ids[state.request_id], made.token_ids
        stop = self._find_stop(caller_id, state, token_ids, is_known=False)
        if stop is not None:
            token_ids = token_ids[: stop.num_tokens]
        is_finished = (
            stop is not None
            or not made.is_finite
            or len(token_ids) == _remaining_tokens(state)
            or token_ids[-1] in state._eos_token_ids
        )
        self._book.add_tokens(caller_id, len(token_ids), made.logprobs, end_s)
        complete_blocks = {} if is_finished else self._cache.count_new_complete_blocks(state, len(token_ids))
        state.generated_tokens.extend(token_ids)
        state.tokens_to_process = token_ids[-1:]
        state.position_offset += len(token_ids)
        if is_finished:
            self._leave(state)
            # What follows a stop string was never asked for, finite or not.
            self._finish(caller_id, generated_ids(state), made.is_finite or stop is not None, stop, end_s)
        else:
            self._cache.mark_complete_blocks(state, complete_blocks)
        return is_finished

    def _leave(self, state: RequestState) -> None:
        """Take a request that has ended out of the cache."""
        state.status = RequestStatus.FINISHED
        self._scheduler.finish_request(state.request_id)
        self._scheduler.block_new_requests = False

    def _finish(
        self,
        caller_id: str,
        token_ids: tuple[int, ...],
        is_finite: bool,
        stop: FoundStop | None,
        end_s: float,
    ) -> None:
        error = (
            None
            if is_finite
            else f"after {len(token_ids)} new tokens its logits are not finite, or leave nothing to choose"
        )
        self._book.finish(caller_id, token_ids, error, end_s, stop and stop.string)

    def _find_stop(
        self, caller_id: str, state: RequestState, new_ids: Sequence[int], *, is_known: bool
    ) -> FoundStop | None:
        """The stop string that one of `new_ids` completes, by how many of them; EOS goes before.

        `is_known`: whether the request has them already.
        """
        sampling = self._book.group_of(caller_id).sampling
        if not sampling.stop_strings or not new_ids:
            return None
        token_ids = generated_ids(state) if is_known else (*generated_ids(state), *new_ids)
        num_old = len(token_ids) - len(new_ids)
        num_searched = max(num_old, sampling.min_new_tokens)
        if num_searched >= len(token_ids):
            return None
        found = find_stop_string(self._tokenizer, token_ids, num_searched, sampling.stop_strings)
        return found and found._replace(num_tokens=found.num_tokens - num_old)

    def recompute(self, version: int) -> None:
        """Have every request read again, with what it has generated, for the policy `version` to go on with.

        The device must have been waited for.
        """
        self._book.version = version
        scheduler = self._scheduler
        waiting = [scheduler.waiting_requests[key] for key in scheduler.waiting_requests_order]
        active = list(scheduler.active_requests.values())
        scheduler.reset()
        self._free_blocks()
        for state in active:
            scheduler.add_waiting_request(state.create_equivalent_initial_request())
        for state in waiting:
            scheduler.add_waiting_request(state)

    def _to_caller_ids(self, states: Iterable[RequestState]) -> tuple[str, ...]:
        return tuple(self._caller_ids[state.request_id] for state in states)


def _free_workspaces() -> None:
    """Give back what the vendor's library keeps for each stream that has multiplied: 32 MiB on an H200.

    Not while there are graphs, of the caller or of another driver, which may have the address of one.
    """
    if not any(issubclass(type(item), torch.cuda.CUDAGraph) for item in gc.get_objects()):
        torch._C._cuda_clearCublasWorkspaces()


def _remaining_tokens(state: RequestState) -> int:
    """Tokens that the request may still produce; after an eviction its limit counts from there."""
    limit: int = state._new_tokens_limit
    return limit - state.generated_len()


def _num_fed(state: RequestState, num_steps: int) -> int:
    return min(num_steps, _remaining_tokens(state))


def _step_kind(batch: list[FutureRequestState]) -> StepKind:
    """A row decodes when it has generated before; reading an evicted request again is prefill."""
    num_decoding = sum(bool(future.state.generated_tokens) for future in batch)
    if num_decoding == 0:
        return "prefill"
    return "decode" if num_decoding == len(batch) else "mixed"
