"""The peer that calls transformers' `generate` on a left-padded batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.requests import PromptGroup, RequestBook
from cbexp.peers.base import PeerDriver
from cbexp.peers.generate_steps import StepWatcher, describe_steps, trim_at_end

SUPPORTED_COMPILE_MODES = ("auto", "eager")


@dataclass(frozen=True)
class _Row:
    """One request as a row of a batch."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int


class GenerateDriver(PeerDriver):
    """Greedy `generate` with a dynamic cache, in eager mode; implements `RolloutDriver`.

    All requests are one batch unless `max_requests_per_batch` splits them, in submission order. A batch runs
    to the largest of its limits: tokens that a request generates past its own limit, or past its EOS, are cut
    and not counted. The generations of a prompt are rows of their own. Of the model's own generation config
    nothing is used.
    """

    supported_compile_modes = SUPPORTED_COMPILE_MODES

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
        watcher = StepWatcher()
        try:
            ids = self._generate(batch, watcher)
        except BaseException:
            self._record(batch, watcher.last_seen_ids(), watcher, book)
            raise
        lengths = self._record(batch, ids, watcher, book)
        prompt_lengths = [len(row.prompt_ids) for row in batch]
        self._steps += describe_steps(watcher.step_times_s, prompt_lengths, lengths, num_waiting)

    def _generate(self, batch: list[_Row], watcher: StepWatcher) -> list[list[int]]:
        """Prompt and generated ids of each row, left padding and everything past the end included."""
        input_ids, attention_mask = _pad_left([row.prompt_ids for row in batch], self._config.pad_token_id)
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
        self, batch: list[_Row], ids: list[list[int]], watcher: StepWatcher, book: RequestBook
    ) -> list[int]:
        """Enter rows that ended in the book, others in `_unfinished`; returns the completions' lengths."""
        times_s = watcher.step_times_s
        if not times_s:
            return []
        width = max(len(row.prompt_ids) for row in batch)
        lengths = []
        for row, row_ids in zip(batch, ids, strict=True):
            kept, has_ended = trim_at_end(row_ids[width:], row.max_new_tokens, self._config.eos_token_ids)
            lengths.append(len(kept))
            book.mark_scheduled([row.request_id], times_s[0][0])
            if kept:
                book.mark_tokens([row.request_id], times_s[0][1])
            if has_ended:
                book.finish(row.request_id, kept, None, times_s[len(kept) - 1][1])
            else:
                self._unfinished[row.request_id] = kept
        return lengths

    def _build_generation_config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(self._config.eos_token_ids) or None,
            pad_token_id=self._config.pad_token_id,
        )


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
