"""From the steps that a driver saw to step records and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from cbexp.metrics.inputs import StepLike
from cbexp.metrics.quantiles import quantiles
from cbexp.metrics.records import StepRecord, StepSummary


def summarize_step_records(round_index: int, start_s: float, steps: Sequence[StepLike]) -> list[StepRecord]:
    """One record for each step of a round that started at `start_s` on the clock of the steps."""
    return [
        StepRecord(
            round_index=round_index,
            step_index=index,
            kind=step.kind,
            num_steps=step.num_steps,
            num_requests=step.num_requests,
            num_tokens=step.num_tokens,
            num_padding=step.num_padding,
            bucket=step.bucket,
            start_s=step.start_s - start_s,
            duration_s=_duration_s(step),
            num_waiting=step.num_waiting,
            num_finished=step.num_finished,
            cache_used_fraction=step.cache_used_fraction,
        )
        for index, step in enumerate(steps)
    ]


def summarize_steps(steps: Sequence[StepLike], wall_s: float) -> StepSummary | None:
    """The steps of a round of `wall_s` seconds taken together; None when there are none to see."""
    if not steps:
        return None
    shares = {kind: _kind_duration_s(steps, kind) / wall_s for kind in ("prefill", "mixed", "decode")}
    batches = _per_single_step(steps, "prefill", "mixed", "decode")
    mean_batch, peak_batch = fmean(batches), max(step.num_requests for step in steps)
    decode_batches = _per_single_step(steps, "decode")
    bursts = [step for step in steps if step.kind == "decode"]
    return StepSummary(
        num_steps=len(batches),
        prefill_share=shares["prefill"],
        mixed_share=shares["mixed"],
        decode_share=shares["decode"],
        outside_steps_share=1 - sum(shares.values()),
        decode_step_s=quantiles(_decode_step_times_s(steps)),
        mean_decode_batch=fmean(decode_batches) if decode_batches else None,
        mean_batch=mean_batch,
        peak_batch=peak_batch,
        occupancy=mean_batch / peak_batch if peak_batch else 0.0,
        padding_share=_padding_share(steps),
        num_bursts=len(bursts),
        steps_per_burst=fmean(burst.num_steps for burst in bursts) if bursts else None,
        tokens_per_burst=fmean(burst.num_tokens for burst in bursts) if bursts else None,
        mean_cache_used=_mean_cache_used(steps),
        peak_cache_used=max(step.cache_used_fraction for step in steps),
    )


def _duration_s(step: StepLike) -> float:
    return step.end_s - step.start_s


def _kind_duration_s(steps: Sequence[StepLike], kind: str) -> float:
    return sum(_duration_s(step) for step in steps if step.kind == kind)


def _per_single_step(steps: Sequence[StepLike], *kinds: str) -> list[float]:
    """The batch of every single step, those inside a burst included."""
    return [_mean_batch(step) for step in steps if step.kind in kinds for _ in range(step.num_steps)]


def _mean_batch(step: StepLike) -> float:
    """Requests of a step. Those that end inside a burst leave it: each decode step gives an active one a token."""
    return step.num_tokens / step.num_steps if step.kind == "decode" else step.num_requests


def _decode_step_times_s(steps: Sequence[StepLike]) -> list[float]:
    """Seconds of every decode step; the steps of a burst share its time equally."""
    return [
        _duration_s(step) / step.num_steps
        for step in steps
        if step.kind == "decode"
        for _ in range(step.num_steps)
    ]


def _padding_share(steps: Sequence[StepLike]) -> float:
    num_padding = sum(step.num_padding for step in steps)
    num_rows = num_padding + sum(step.num_tokens for step in steps)
    return num_padding / num_rows if num_rows else 0.0


def _mean_cache_used(steps: Sequence[StepLike]) -> float:
    total_s = sum(_duration_s(step) for step in steps)
    if not total_s:
        return fmean(step.cache_used_fraction for step in steps)
    return sum(step.cache_used_fraction * _duration_s(step) for step in steps) / total_s
