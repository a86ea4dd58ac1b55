"""Transformers' `generate` on a left-padded batch as a driver, and what can be seen of its steps from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from cbexp.drivers.inputs import DriverInputs
from cbexp.drivers.peer_sampling import generation_fields
from cbexp.drivers.random_numbers import own_random_numbers
from cbexp.drivers.registry import DRIVERS
from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.model_driver import ModelDriver
from cbexp.engine.requests import PromptGroup, RequestBook, RequestLimits
from cbexp.engine.stop_strings import find_stop_string
from cbexp.engine.types import CBSyncConfig, StepInfo


def build(inputs: DriverInputs) -> GenerateDriver:
    """Return the driver."""
    return GenerateDriver(inputs.model, inputs.settings, inputs.tokenizer)


@dataclass(frozen=True)
class _Row:
    """One request as a row of a batch."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int


class GenerateDriver(ModelDriver):
    """`generate` with a dynamic cache, in eager mode; implements `RolloutDriver`.

    All requests are one batch unless `max_requests_per_batch` splits them, in submission order. A batch runs
    to the largest of its limits: tokens that a request generates past its own limit, or past its end, are cut
    and not counted. The generations of a prompt are rows of their own.
    """

    kind = DRIVERS["generate"]

    def __init__(self, model: Any, config: CBSyncConfig, tokenizer: Any = None) -> None:
        self.kind.check_compile_mode(config.compile_mode)
        super().__init__(model, config, tokenizer=tokenizer)
        self.kind.check_sampling(self._decoding.sampling, config.logprobs)

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON; `max_requests_per_batch` None: all requests of a drive."""
        return super().resolved | {
            "compile_mode": "eager",
            "cuda_graph": False,
            "cache_implementation": "dynamic",
            "padding_side": "left",
            "max_requests_per_batch": self._config.max_requests_per_batch,
        }

    def _request_limits(self) -> RequestLimits:
        return replace(super()._request_limits(), has_own_sampling=False)

    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> None:
        rows = [_Row(i, g.prompt_ids, g.max_new_tokens) for g in groups for i in g.request_ids]
        batch_size = self._config.max_requests_per_batch or len(rows)
        with (
            borrowed_for_inference(self._model, self._model.config._attn_implementation),
            _without_own_generation_config(self._model),
            own_random_numbers(self._config.seed, groups[0].submission),
        ):
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                self._run_batch(batch, num_waiting=len(rows) - start - len(batch), book=book)

    def _run_batch(self, batch: list[_Row], num_waiting: int, book: RequestBook) -> None:
        watcher = _StepWatcher()
        try:
            ids = self._generate(batch, watcher)
        except BaseException:
            self._record(batch, watcher.last_seen_ids(), watcher, book)
            raise
        lengths = self._record(batch, ids, watcher, book)
        prompt_lengths = [len(row.prompt_ids) for row in batch]
        self._steps += _describe_steps(watcher.step_times_s, prompt_lengths, lengths, num_waiting)

    def _generate(self, batch: list[_Row], watcher: _StepWatcher) -> list[list[int]]:
        """Prompt and generated ids of each row, left padding and everything past the end included."""
        input_ids, attention_mask = _pad_left([row.prompt_ids for row in batch], self._pad_token_id)
        hook = self._model.register_forward_pre_hook(watcher.on_forward)
        try:
            model: Any = self._model
            output = model.generate(
                input_ids.to(self._model.device),
                attention_mask=attention_mask.to(self._model.device),
                generation_config=self._build_generation_config(max(row.max_new_tokens for row in batch)),
                logits_processor=LogitsProcessorList([watcher]),
                stopping_criteria=self._build_stopping_criteria(input_ids.shape[1]),
            )
        finally:
            hook.remove()
        ids: list[list[int]] = output.tolist()
        watcher.finish()
        return ids

    def _record(
        self, batch: list[_Row], ids: list[list[int]], watcher: _StepWatcher, book: RequestBook
    ) -> list[int]:
        """Enter rows that ended in the book, others in `_unfinished`; returns the completions' lengths."""
        times_s = watcher.step_times_s
        if not times_s:
            return []
        width = max(len(row.prompt_ids) for row in batch)
        lengths = []
        for row, row_ids in zip(batch, ids, strict=True):
            new_ids = row_ids[width:]
            length, stop_string = self._find_end(new_ids[: row.max_new_tokens])
            has_ended = length is not None or len(new_ids) >= row.max_new_tokens
            kept = tuple(new_ids[: row.max_new_tokens if length is None else length])
            lengths.append(len(kept))
            book.mark_scheduled([row.request_id], times_s[0][0])
            if kept:
                book.mark_tokens([row.request_id], times_s[0][1])
            if has_ended:
                book.finish(row.request_id, kept, None, times_s[len(kept) - 1][1], stop_string)
            else:
                self._unfinished[row.request_id] = kept
        return lengths

    @property
    def _pad_token_id(self) -> int:
        """Nothing reads it: any will do."""
        return self._decoding.pad_token_id or 0

    @property
    def _stop_token_ids(self) -> list[int]:
        return [*self._decoding.eos_token_ids, *self._decoding.sampling.stop_token_ids]

    def _find_end(self, token_ids: Sequence[int], num_searched: int = 0) -> tuple[int | None, str | None]:
        """How many of a row's new tokens count, None: all; and the stop string that the last of them completes.

        The first `num_searched` are known to hold no end.
        """
        sampling, stops = self._decoding.sampling, set(self._stop_token_ids)
        ends = (index for index in range(num_searched, len(token_ids)) if token_ids[index] in stops)
        length = next((index + 1 for index in ends), None)
        num_searched = max(num_searched, sampling.min_new_tokens)
        if not sampling.stop_strings or num_searched >= len(token_ids):
            return length, None
        found = find_stop_string(self._tokenizer, token_ids[:length], num_searched, sampling.stop_strings)
        return (length, None) if found is None else (found.num_tokens, found.string)

    def _build_stopping_criteria(self, width: int) -> StoppingCriteriaList:
        has_strings = bool(self._decoding.sampling.stop_strings)
        return StoppingCriteriaList([_StopStrings(self._find_end, width)] if has_strings else [])

    def _build_generation_config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            use_cache=True,
            eos_token_id=self._stop_token_ids or None,
            pad_token_id=self._pad_token_id,
            **generation_fields(self._decoding.sampling),
        )


class _StopStrings(StoppingCriteria):
    """Ends rows of a batch whose text has a stop string, by `find_end`; the first `width` tokens are the prompt's."""

    def __init__(
        self, find_end: Callable[[Sequence[int], int], tuple[int | None, str | None]], width: int
    ) -> None:
        self._find_end = find_end
        self._width = width
        self._ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Which of the rows (rows x ids so far) have ended, bool [rows]."""
        num_rows, num_ids = input_ids.shape
        for index, ids in enumerate(input_ids[:, self._width :].tolist()):
            if index not in self._ended and self._find_end(ids, num_ids - self._width - 1)[1] is not None:
                self._ended.add(index)
        return torch.tensor([index in self._ended for index in range(num_rows)], device=input_ids.device)


class _StepWatcher(LogitsProcessor):
    """Watches one `generate` call: as a forward pre-hook it notes times, as a logits processor it keeps ids.

    Nothing here waits for the device. `generate` itself reads after each step whether every row has ended, so
    the next forward starts on the host when the token before it is known; that start ends the step. Times are
    on the perf_counter clock in seconds.
    """

    def __init__(self) -> None:
        self._boundaries_s: list[float] = []
        self._ids: torch.Tensor | None = None

    def on_forward(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        """The pre-hook of the model's forward, called once a step."""
        self._boundaries_s.append(time.perf_counter())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keep `input_ids` (rows x ids so far, prompts too) and leave `scores` (rows x vocabulary) alone."""
        self._ids = input_ids
        return scores

    def finish(self) -> None:
        """Note the end of the last step, once `generate` has returned and its output is on the host."""
        self._boundaries_s.append(time.perf_counter())

    @property
    def step_times_s(self) -> list[tuple[float, float]]:
        """Start and end of each step that has ended."""
        return list(zip(self._boundaries_s, self._boundaries_s[1:], strict=False))

    def last_seen_ids(self) -> list[list[int]]:
        """Each row's ids before the running step, prompts too; empty when no forward has returned. Waits."""
        ids: list[list[int]] = [] if self._ids is None else self._ids.tolist()
        return ids


def _pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, both (prompts x longest prompt) int64, prompts flush right."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


@contextmanager
def _without_own_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Put an empty generation config in the model's place: `generate` fills every unset field from there."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _describe_steps(
    step_times_s: Sequence[tuple[float, float]],
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    num_waiting: int,
) -> list[StepInfo]:
    """The step records of one left-padded batch, whose first step prefills.

    Rows that have their last token stay in the batch until all have: they count as padding, like the left
    padding of the prompts. `cache_used_fraction` is 0, since the cache of `generate` grows and has no size to
    take a share of.
    """
    num_rows = len(prompt_lengths)
    steps = []
    for index, (start_s, end_s) in enumerate(step_times_s):
        num_running = sum(length > index for length in completion_lengths)
        num_tokens = num_running if index else sum(prompt_lengths)
        num_computed = num_rows if index else num_rows * max(prompt_lengths)
        steps.append(
            StepInfo(
                kind="decode" if index else "prefill",
                num_steps=1,
                num_requests=num_running,
                num_tokens=num_tokens,
                num_padding=num_computed - num_tokens,
                bucket=None,
                start_s=start_s,
                end_s=end_s,
                num_waiting=num_waiting,
                num_finished=sum(length == index + 1 for length in completion_lengths),
                cache_used_fraction=0.0,
            )
        )
    return steps
