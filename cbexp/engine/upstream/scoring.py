"""Has transformers' batching read given completions: what follows a prompt is more of it, for each fork its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import RequestState

from cbexp.engine.forward import Forward
from cbexp.engine.sampling import HeadInputs, head_logits
from cbexp.engine.scoring import ScoredGroup, rows_at_once, token_logprobs
from cbexp.engine.types import Scores
from cbexp.engine.upstream.build import child_id


@dataclass(frozen=True)
class _Completion:
    """Where a completion is in the call, how long its prompt is, and its tokens."""

    index: int
    prompt_length: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Rows:
    """Tokens of a batch, by their places in it, whose logits score the tokens of `completion` from `start` on."""

    completion: _Completion
    start: int
    places: range


class Scorer:
    """Scores completions on `processor`, inside its stream. It has no other requests, and must be reset afterwards."""

    def __init__(
        self, processor: ContinuousBatchProcessor, forward: Forward, temperature: float, *, fp32_head: bool
    ) -> None:
        self._processor = processor
        self._scheduler: Any = processor.scheduler
        self._inputs = cast(ContinuousBatchingIOs, processor.inputs_and_outputs)
        self._forward = forward
        self._temperature = temperature
        self._fp32_head = fp32_head
        self._completions: dict[str, _Completion] = {}
        # Requests that have nothing but their prompt to read so far.
        self._without_completion: set[str] = set()
        self._scores: dict[int, Tensor] = {}

    def run(self, groups: Sequence[ScoredGroup]) -> dict[int, Scores]:
        """Each completion's scores by its place in the call."""
        for group in groups:
            self._submit(group)
        self._add_completions()
        self._scheduler.admission = "upstream"
        with self._without_prefix_matches():
            while self._processor.prepare_next_batch():
                self._score_batch()
                self._processor.update_batch()
                self._add_completions()
        if self._scheduler.has_pending_requests():
            raise RuntimeError("transformers schedules nothing, though completions are left to be scored.")
        return {index: Scores(*map(tuple, scores.T.tolist())) for index, scores in self._scores.items()}

    def _submit(self, group: ScoredGroup) -> None:
        """Queue a prompt; a request ends with the one token that upstream has it make, whatever that is."""
        first, *others = group.completions.items()
        parent_id, length = f"score_{first[0]}", len(group.prompt_ids)
        state = RequestState(
            request_id=parent_id,
            initial_tokens=list(group.prompt_ids),
            max_new_tokens=1,
            num_children=len(others),
        )
        ids = [parent_id, *(child_id(parent_id, i) for i in range(len(others)))]
        for request_id, (index, token_ids) in zip(ids, (first, *others), strict=True):
            self._completions[request_id] = _Completion(index, length, token_ids)
            self._scores[index] = torch.full((len(token_ids), 2), math.nan)
        self._without_completion.update(ids)
        self._scheduler.num_slots = max(self._scheduler.num_slots, len(ids))
        self._scheduler.add_waiting_request(state)

    def _add_completions(self) -> None:
        """Let each request that is not to be split any more read its completion, but the last token, behind the prompt.

        That is so once the last token of the prompt is all that is left of it, or where a fork found no room.
        """
        scheduler = self._scheduler
        for state in (*scheduler.active_requests.values(), *scheduler.waiting_requests.values()):
            if state.num_children == 0 and state.request_id in self._without_completion:
                self._without_completion.remove(state.request_id)
                token_ids = list(self._completions[state.request_id].token_ids[:-1])
                state.initial_tokens = state.initial_tokens + token_ids
                state.remaining_prefill_tokens = state.remaining_prefill_tokens + token_ids

    def _score_batch(self) -> None:
        inputs = self._inputs
        if inputs.num_q_tokens == 0:  # parents whose prompt has one token
            return
        rows = list(self._find_rows())
        places = [place for part in rows for place in part.places]
        if not places:
            self._forward.prefill(self._batch(), 1)
            return
        targets = [
            token
            for part in rows
            for token in part.completion.token_ids[part.start : part.start + len(part.places)]
        ]
        device = inputs.device
        chunk_rows = rows_at_once(inputs.config.vocab_size)
        of_rows, of_targets = (
            torch.tensor(values, device=device).split(chunk_rows) for values in (places, targets)
        )
        logprobs = torch.cat(
            self._forward.prefill_in_chunks(self._batch(), of_rows, partial(self._score, of_targets))
        ).cpu()
        for part, scores in zip(rows, logprobs.split([len(part.places) for part in rows]), strict=True):
            self._scores[part.completion.index][part.start : part.start + len(scores)] = scores

    def _score(self, targets: Sequence[Tensor], logits: Tensor | HeadInputs, chunk: int) -> Tensor:
        if isinstance(logits, HeadInputs):
            hidden, weight = logits
            logits = cast(Tensor, head_logits(hidden, weight, self._fp32_head))
        return token_logprobs(logits, targets[chunk], self._temperature)

    def _batch(self) -> dict[str, Any]:
        return cast(dict[str, Any], self._inputs.get_model_kwargs())

    def _find_rows(self) -> Iterator[_Rows]:
        """Of each request in the batch; the token before a completion scores its first one, and so on."""
        place = 0
        for future in self._inputs.requests_in_batch:
            completion, count = self._completions[future.state.request_id], future.query_length
            before = completion.prompt_length - 1
            position = future.state.position_offset - count  # of its first token; upstream has moved it on
            start, stop = max(position, before), min(position + count, before + len(completion.token_ids))
            if start < stop:
                first = place + start - position
                yield _Rows(completion, start - before, range(first, first + stop - start))
            place += count

    @contextmanager
    def _without_prefix_matches(self) -> Iterator[None]:
        """Tokens of a completion that another one has in the cache would not be read, and go unscored."""
        cache = self._processor.cache
        before, cache.use_prefix_sharing = cache.use_prefix_sharing, False
        try:
            yield
        finally:
            cache.use_prefix_sharing = before
