"""How the completions of one prompt, its group, were judged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import comb
from statistics import fmean, pstdev

from cbexp.metrics.records import RequestRecord


def summarize_groups(
    rounds: Sequence[Sequence[RequestRecord]], num_generations: int
) -> dict[str, float] | None:
    """Figures over the groups of timed rounds; None of groups of one, and where a completion was not judged.

    A round's requests are in order, the generations of a prompt side by side. A group is one prompt's completions in
    one round. Its verdicts count 1 (right) or 0; `verdict_std` is the deviation within a group. `pass_at_1` and
    `pass_at_k`, with k = `num_generations`, are of each prompt's completions in all rounds.
    """
    verdicts = [[request.verdict for request in requests] for requests in rounds]
    if num_generations < 2 or any(verdict is None for own in verdicts for verdict in own):
        return None
    starts = range(0, len(verdicts[0]), num_generations)
    groups = [
        [int(bool(v)) for v in own[start : start + num_generations]] for own in verdicts for start in starts
    ]
    by_prompt = [[*chain(*groups[index :: len(starts)])] for index in range(len(starts))]
    return {
        "num_groups": len(groups),
        "verdict_mean": fmean(map(fmean, groups)),
        "verdict_std": fmean(map(pstdev, groups)),
        "all_right_share": fmean(map(all, groups)),
        "all_wrong_share": fmean(not any(group) for group in groups),
        "pass_at_1": fmean(estimate_pass_at_k(len(own), sum(own), 1) for own in by_prompt),
        "k": num_generations,
        "pass_at_k": fmean(estimate_pass_at_k(len(own), sum(own), num_generations) for own in by_prompt),
    }


def estimate_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that one of `k` completions is right, without bias, from at least as many samples.

    Source: Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1.
    """
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)
