"""From completions to request records, completion rows and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cbexp.engine.types import Completion, RequestTimings
from cbexp.metrics.records import LOST, RequestRecord


def summarize_requests(
    round_index: int,
    completions: Mapping[str, Completion],
    request_ids: Sequence[str],
    verdicts: Sequence[bool | None],
    limits: Sequence[int],
) -> list[RequestRecord]:
    """One record for each of `request_ids`, in their order; `verdicts` and `limits` (new tokens) are parallel to them.

    Raises:
        ValueError: the sequences differ in length, or a completion has an id that was not submitted.
    """
    unknown = sorted(set(completions) - set(request_ids))
    if unknown:
        raise ValueError(f"completions for requests that were not submitted: {', '.join(unknown[:3])}")
    return [
        _summarize_request(round_index, request_id, completions.get(request_id), verdict, limit)
        for request_id, verdict, limit in zip(request_ids, verdicts, limits, strict=True)
    ]


def summarize_completions(
    round_index: int,
    completions: Mapping[str, Completion],
    request_ids: Sequence[str],
    texts: Sequence[str | None],
    verdicts: Sequence[bool | None],
) -> list[dict[str, Any]]:
    """One row for each completion that came back, in the order of `request_ids`: token ids, text, reasons, verdict."""
    return [
        {
            "round_index": round_index,
            "request_id": request_id,
            "finish_reason": completions[request_id].finish_reason,
            "stop_reason": completions[request_id].stop_reason,
            "verdict": verdict,
            "text": text,
            "completion_ids": list(completions[request_id].completion_ids),
            "prompt_ids": list(completions[request_id].prompt_ids),
        }
        for request_id, text, verdict in zip(request_ids, texts, verdicts, strict=True)
        if request_id in completions
    ]


def digest_ids(token_ids: Iterable[int]) -> str:
    """SHA-256 (hex) of the token ids, as decimal numbers with commas between them."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def digest_completions(requests: Sequence[RequestRecord]) -> str:
    """SHA-256 (hex) over the completions of a round in submission order, the reason each ended included."""
    lines = (f"{request.completion_digest} {request.finish_reason}" for request in requests)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _summarize_request(
    round_index: int, request_id: str, completion: Completion | None, verdict: bool | None, limit: int
) -> RequestRecord:
    if completion is None:
        return _lost_request(round_index, request_id, limit)
    timings, num_tokens = completion.timings, len(completion.completion_ids)
    ttft_s = _since_submission(timings, timings.first_token_s)
    latency_s = _since_submission(timings, timings.finished_s)
    return RequestRecord(
        round_index=round_index,
        request_id=request_id,
        finish_reason=completion.finish_reason,
        num_prompt_tokens=len(completion.prompt_ids),
        num_tokens=num_tokens,
        max_new_tokens=limit,
        queue_s=_since_submission(timings, timings.scheduled_s),
        ttft_s=ttft_s,
        tpot_s=_time_per_output_token(ttft_s, latency_s, num_tokens),
        latency_s=latency_s,
        verdict=verdict,
        completion_digest=digest_ids(completion.completion_ids),
        error=completion.error,
    )


def _lost_request(round_index: int, request_id: str, limit: int) -> RequestRecord:
    return RequestRecord(
        round_index=round_index,
        request_id=request_id,
        finish_reason=LOST,
        num_prompt_tokens=0,
        num_tokens=0,
        max_new_tokens=limit,
        queue_s=None,
        ttft_s=None,
        tpot_s=None,
        latency_s=None,
        verdict=None,
        completion_digest=digest_ids(()),
        error="no completion came back",
    )


def _since_submission(timings: RequestTimings, moment_s: float | None) -> float | None:
    return None if moment_s is None else moment_s - timings.submitted_s


def _time_per_output_token(ttft_s: float | None, latency_s: float | None, num_tokens: int) -> float | None:
    """None for a single token: there is no gap to measure."""
    if ttft_s is None or latency_s is None or num_tokens < 2:
        return None
    return (latency_s - ttft_s) / (num_tokens - 1)
