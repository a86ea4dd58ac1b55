"""Rescoring of a run: a sample of what its timed rounds made goes once more through the model, in training form."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbexp.config import RescoreConfig
from cbexp.engine import Completion
from cbexp.engine.rescoring import RescoredCompletion, Rescoring, rescore, takes_best_tokens
from cbexp.engine.types import Sampling
from cbexp.model.loading import LoadedModel
from cbexp.rounds import RoundResult


@dataclass
class RescoringSample:
    """The completions of a run that are to be rescored, kept while its rounds go by.

    `chosen` has them as (timed round, request), both counted from 0. `kept`: a name, the request and its completion.
    """

    chosen: Sequence[tuple[int, int]]
    kept: list[tuple[str, int, Completion]] = field(default_factory=list)

    def keep(self, timed_round: int, round_index: int, result: RoundResult) -> None:
        """Keep what was chosen of a round in which every request has ended."""
        for chosen_round, request in self.chosen:
            if chosen_round == timed_round:
                request_id = result.request_ids[request]
                name = f"round {round_index}, {request_id}"
                self.kept.append((name, request, result.completions[request_id]))

    def rescore(
        self,
        loaded: LoadedModel,
        prompt_ids: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
    ) -> Rescoring:
        """Rescore what was kept, at least one, against the prompts as they were submitted; all with one `sampling`.

        Raises:
            EngineError: a token is outside the vocabulary, or logits are not finite.
        """
        # Not what a completion says of its prompt: it may be another request's.
        return Rescoring(
            [
                rescore(
                    loaded.model,
                    name,
                    prompt_ids[request // num_generations],
                    completion.completion_ids,
                    logprobs=completion.logprobs_model or None,
                    temperature=sampling.temperature,
                )
                for name, request, completion in self.kept
            ],
            is_greedy=takes_best_tokens(sampling),
        )


def choose_sample(
    config: RescoreConfig, num_rounds: int, num_requests: int, seed: int
) -> list[tuple[int, int]]:
    """Choose (timed round, request) pairs: rounds in turn, and requests from every part of a round.

    The last request is always among them: it has a full batch's last row.
    """
    total = num_rounds * num_requests
    count = total if config.completions == "all" else min(int(config.completions), total)
    rng = random.Random(seed)
    rounds = rng.sample(range(num_rounds), num_rounds)
    chosen = []
    for part in range(count):
        start, end = (place * num_requests // count for place in (part, part + 1))
        request = num_requests - 1 if part == count - 1 else rng.randrange(start, max(start + 1, end))
        chosen.append((rounds[part % num_rounds], request))
    return chosen


def describe_rescoring(rescoring: Rescoring, driver_name: str) -> dict[str, Any]:
    """The content of the summary's `rescoring`: figures that do not exist are not there; `note` is None, or why."""
    note = None
    if not rescoring.is_greedy and not rescoring.has_logprobs:
        note = f"driver={driver_name} gives no log-probabilities: only that logits are finite was checked"
    counts = {"num_completions": len(rescoring.completions), "num_tokens": rescoring.num_tokens}
    return {**counts, **rescoring.figures, "note": note}


def describe_none(note: str) -> dict[str, Any]:
    """The same where nothing was rescored."""
    return {"num_completions": 0, "num_tokens": 0, "note": note}


def list_details(rescoring: Rescoring, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The content of rescoring.json: all figures, what they are held to, and a row for each completion."""
    return {
        **summary,
        **rescoring.details,
        "bounds": rescoring.bounds,
        "problem": rescoring.find_problem(),
        "completions": [
            _describe_completion(completion, rescoring.is_greedy) for completion in rescoring.completions
        ],
    }


def _describe_completion(completion: RescoredCompletion, is_greedy: bool) -> dict[str, Any]:
    alone = Rescoring([completion], is_greedy)
    ratio = {} if completion.ratio is None else {"ratio": completion.ratio}
    return {
        "name": completion.name,
        "num_tokens": alone.num_tokens,
        **alone.figures,
        **alone.details,
        **ratio,
    }
