"""Sees the steps of transformers' `generate` from outside: times, and the tokens of a call cut short."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor

from cbexp.engine.types import StepInfo


class StepWatcher(LogitsProcessor):
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


def trim_at_end(
    token_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], bool]:
    """The tokens that count, up to the first EOS (included) or the limit, and whether it ends there."""
    for index, token_id in enumerate(token_ids[:max_new_tokens]):
        if token_id in eos_token_ids:
            return tuple(token_ids[: index + 1]), True
    return tuple(token_ids[:max_new_tokens]), len(token_ids) >= max_new_tokens


def describe_steps(
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
