"""From the requests and steps of a round to its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cbexp.engine.types import StepInfo
from cbexp.metrics.quantiles import Quantiles, quantiles
from cbexp.metrics.records import FINISH_REASONS, LOST, MemoryUse, RequestRecord, RoundRecord
from cbexp.metrics.requests import digest_completions
from cbexp.metrics.steps import summarize_steps


def summarize_round(
    round_index: int,
    is_warmup: bool,
    start_s: float,
    end_s: float,
    requests: Sequence[RequestRecord],
    steps: Sequence[StepInfo],
    memory: MemoryUse | None,
) -> RoundRecord:
    """The record of a round between two moments of one clock; `steps` as the driver tells them.

    Raises:
        ValueError: the round has no duration.
    """
    wall_s = end_s - start_s
    if wall_s <= 0:
        raise ValueError(
            f"round {round_index} ends at {end_s} s, which is not after its start at {start_s} s"
        )
    finished = [request for request in requests if request.is_finished]
    num_prompt_tokens = sum(request.num_prompt_tokens for request in finished)
    num_output_tokens = sum(request.num_tokens for request in finished)
    reasons = Counter(request.finish_reason for request in requests)
    verdicts = [request.verdict for request in requests if request.verdict is not None]
    return RoundRecord(
        round_index=round_index,
        is_warmup=is_warmup,
        wall_s=wall_s,
        num_requests=len(requests),
        num_finished=len(finished),
        num_failed=reasons["failed"],
        num_lost=reasons[LOST],
        finish_reasons={reason: reasons[reason] for reason in FINISH_REASONS},
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_discarded_tokens=sum(request.num_tokens for request in requests) - num_output_tokens,
        output_tokens_per_s=num_output_tokens / wall_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / wall_s,
        requests_per_s=len(finished) / wall_s,
        num_judged=len(verdicts),
        num_correct=sum(verdicts),
        accuracy=sum(verdicts) / len(verdicts) if verdicts else None,
        queue_s=times_of(finished, "queue_s"),
        ttft_s=times_of(finished, "ttft_s"),
        tpot_s=times_of(finished, "tpot_s"),
        latency_s=times_of(finished, "latency_s"),
        steps=summarize_steps(steps, wall_s),
        memory=memory,
        completions_digest=digest_completions(requests),
    )


def times_of(requests: Sequence[RequestRecord], field: str) -> Quantiles | None:
    """Quantiles of one time over the requests that have it."""
    return quantiles([value for request in requests if (value := getattr(request, field)) is not None])
