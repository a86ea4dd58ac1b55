"""Runs one round under the clock and checks what came back; nothing of this file writes anything."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from cbexp.dataset.prompts import PromptSet
from cbexp.drivers.registry import OwnProcess
from cbexp.engine import Completion, RolloutDriver
from cbexp.environment import GIB, measure_memory, synchronize
from cbexp.metrics import MemoryUse


@dataclass(frozen=True)
class RoundResult:
    """A round as it came out. Times in seconds (perf_counter); `request_ids` in submission order.

    `limits` (new tokens), `texts` and `verdicts` are parallel to `request_ids`; a text or verdict is None without
    tokenizer, verifier or completion.
    """

    start_s: float
    end_s: float
    request_ids: list[str]
    completions: Mapping[str, Completion]
    limits: list[int]
    texts: list[str | None]
    verdicts: list[bool | None]


class RoundRunner:
    """Submits the same prompts round after round to one driver and judges the answers outside of the clock.

    `limits` has the new tokens that each prompt's requests may have. `process` is the driver where it has one of its
    own, which times the rounds.
    """

    def __init__(
        self,
        driver: RolloutDriver,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase | None,
        limits: Sequence[int],
        num_generations: int,
        device: torch.device,
        process: OwnProcess | None,
    ) -> None:
        self._driver = driver
        self._process = process
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._limits = limits
        self._num_generations = num_generations
        self._device = device
        self._request_ids: list[str] = []
        self._completions: Mapping[str, Completion] | None = None
        self._start_s = 0.0

    @property
    def num_requests(self) -> int:
        """Requests a round has: prompts x generations."""
        return len(self._prompts.prompt_ids) * self._num_generations

    def run(self) -> RoundResult:
        """One whole round, submission to last result, between two device synchronisations.

        The clock is ours, unless the driver has one in a process of its own.
        """
        self._request_ids, self._completions = [], None
        synchronize(self._device)
        self._start_s = time.perf_counter()
        self._request_ids = self._driver.add_requests(
            self._prompts.prompt_ids, max_new_tokens=self._limits, num_generations=self._num_generations
        )
        self._completions = self._driver.drive_until_empty()
        synchronize(self._device)
        end_s = time.perf_counter()
        if self._process is not None:
            self._start_s, end_s = self._process.round_span_s
        return self._judge(self._request_ids, self._completions, end_s)

    def forget(self) -> None:
        """Call when the round's records are written: it is no longer one that could be broken off."""
        self._request_ids = []

    def collect_partial(self) -> RoundResult | None:
        """What the round that was just broken off had produced; None when none was running."""
        if not self._request_ids:
            return None
        completions = self._driver.partial_completions if self._completions is None else self._completions
        return self._judge(self._request_ids, completions, time.perf_counter())

    def _judge(
        self, request_ids: list[str], completions: Mapping[str, Completion], end_s: float
    ) -> RoundResult:
        texts = [self._decode(completions.get(request_id)) for request_id in request_ids]
        verdicts = [
            self._verify(index, completions.get(request_id), text)
            for index, (request_id, text) in enumerate(zip(request_ids, texts, strict=True))
        ]
        limits = [self._limits[index // self._num_generations] for index in range(len(request_ids))]
        return RoundResult(self._start_s, end_s, request_ids, completions, limits, texts, verdicts)

    def _decode(self, completion: Completion | None) -> str | None:
        if self._tokenizer is None or completion is None:
            return None
        return str(self._tokenizer.decode(list(completion.completion_ids), skip_special_tokens=True))

    def _verify(self, index: int, completion: Completion | None, text: str | None) -> bool | None:
        """None means not judged: no verifier, or nothing whole to judge. A completion cut at its limit is judged."""
        verifier, answers = self._prompts.verifier, self._prompts.answers
        if verifier is None or answers is None or text is None or completion is None:
            return None
        if completion.finish_reason == "failed":
            return None
        return verifier(text, answers[index // self._num_generations])


def measure_round_memory(process: OwnProcess | None, device: torch.device) -> MemoryUse:
    """Memory of this process and its device, or what the driver's own process has taken of the device."""
    memory = measure_memory(device)
    if process is None or process.device_bytes is None:
        return memory
    taken_gib = process.device_bytes / GIB
    return replace(memory, reserved_gib=taken_gib, peak_reserved_gib=taken_gib)


def describe_failures(result: RoundResult, limit: int = 3) -> str | None:
    """One line that names failed and missing requests of a round, or None when there are none."""
    problems: list[str] = []
    for request_id in result.request_ids:
        completion = result.completions.get(request_id)
        if completion is None:
            problems.append(f"{request_id}: lost")
        elif completion.finish_reason == "failed":
            problems.append(f"{request_id}: {completion.error}")
    if not problems:
        return None
    shown: Sequence[str] = problems[:limit]
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return (
        f"{len(problems)} of {len(result.request_ids)} requests failed or were lost: {'; '.join(shown)}{more}"
    )
