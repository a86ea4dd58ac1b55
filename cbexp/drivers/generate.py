"""Transformers' `generate` on a left-padded batch as a driver, and what can be seen of its steps from outside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from cbexp.drivers.inputs import DriverInputs
from cbexp.drivers.registry import DRIVERS
from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.model_driver import ModelDriver
from cbexp.engine.requests import PromptGroup, RequestBook
from cbexp.engine.types import CBSyncConfig, StepInfo


def build(inputs: DriverInputs) -> GenerateDriver:
    """Return the driver."""
    return GenerateDriver(inputs.model, inputs.settings)


@dataclass(frozen=True)
class _Row:
    """One request as a row of a batch."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int


class GenerateDriver(ModelDriver):
    """Greedy `generate` with a dynamic cache, in eager mode; implements `RolloutDriver`.

    All requests are one batch unless `max_requests_per_batch` splits them, in submission order. A batch runs
    to the largest of its limits: tokens that a request generates past its own limit, or past its EOS, are cut
    and not counted. The generations of a prompt are rows of their own.
    """

    kind = DRIVERS["generate"]

    def __init__(self, model: Any, config: CBSyncConfig) -> None:
        self.kind.check_compile_mode(config.compile_mode)
        super().__init__(model, config)

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

    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> None:
        rows = [_Row(i, g.prompt_ids, g.max_new_tokens) for g in groups for i in g.request_ids]
        batch_size = self._config.max_requests_per_batch or len(rows)
        with (
            borrowed_for_inference(self._model, self._model.config._attn_implementation),
            _without_own_generation_config(self._model),
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
            kept, has_ended = _trim_at_end(row_ids[width:], row.max_new_tokens, self._decoding.eos_token_ids)
            lengths.append(len(kept))
            book.mark_scheduled([row.request_id], times_s[0][0])
            if kept:
                book.mark_tokens([row.request_id], times_s[0][1])
            if has_ended:
                book.finish(row.request_id, kept, None, times_s[len(kept) - 1][1])
            else:
                self._unfinished[row.request_id] = kept
        return lengths

    @property
    def _pad_token_id(self) -> int:
        """Nothing reads it: any will do."""
        return self._decoding.pad_token_id or 0

    def _build_generation_config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(self._decoding.eos_token_ids) or None,
            pad_token_id=self._pad_token_id,
        )


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


def _trim_at_end(
    token_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], bool]:
    """The tokens that count, up to the first EOS (included) or the limit, and whether it ends there."""
    for index, token_id in enumerate(token_ids[:max_new_tokens]):
        if token_id in eos_token_ids:
            return tuple(token_ids[: index + 1]), True
    return tuple(token_ids[:max_new_tokens]), len(token_ids) >= max_new_tokens


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
