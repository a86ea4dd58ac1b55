"""From the steps that a driver saw to their rows on disk and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from cbexp.engine.types import StepInfo
from cbexp.metrics.quantiles import quantiles
from cbexp.metrics.records import StepSummary


def step_rows(round_index: int, start_s: float, steps: Sequence[StepInfo]) -> list[dict[str, Any]]:
    """One row for each step of a round that started at `start_s`: a `StepInfo` from there on, with its duration."""
    return [
        {"round_index": round_index, "step_index": index, **_row(step, start_s)}
        for index, step in enumerate(steps)
    ]


def summarize_steps(steps: Sequence[StepInfo], wall_s: float) -> StepSummary | None:
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


def _row(step: StepInfo, start_s: float) -> dict[str, Any]:
    """The fields of a step; in the place of its end is its duration."""
    values = vars(step) | {"start_s": step.start_s - start_s, "end_s": step.duration_s}
    return {"duration_s" if name == "end_s" else name: value for name, value in values.items()}


def _kind_duration_s(steps: Sequence[StepInfo], kind: str) -> float:
    return sum(step.duration_s for step in steps if step.kind == kind)


def _per_single_step(steps: Sequence[StepInfo], *kinds: str) -> list[float]:
    """The batch of every single step, those inside a burst included."""
    return [_mean_batch(step) for step in steps if step.kind in kinds for _ in range(step.num_steps)]


def _mean_batch(step: StepInfo) -> float:
    """Requests of a step. Those that end inside a burst leave it: each decode step gives an active one a token."""
    return step.num_tokens / step.num_steps if step.kind == "decode" else step.num_requests


def _decode_step_times_s(steps: Sequence[StepInfo]) -> list[float]:
    """Seconds of every decode step; the steps of a burst share its time equally."""
    return [
        step.duration_s / step.num_steps
        for step in steps
        if step.kind == "decode"
        for _ in range(step.num_steps)
    ]


def _padding_share(steps: Sequence[StepInfo]) -> float:
    num_padding = sum(step.num_padding for step in steps)
    num_rows = num_padding + sum(step.num_tokens for step in steps)
    return num_padding / num_rows if num_rows else 0.0


def _mean_cache_used(steps: Sequence[StepInfo]) -> float:
    total_s = sum(step.duration_s for step in steps)
    if not total_s:
        return fmean(step.cache_used_fraction for step in steps)
    return sum(step.cache_used_fraction * step.duration_s for step in steps) / total_s
