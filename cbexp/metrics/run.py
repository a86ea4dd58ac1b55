"""From the rounds of a run to the content of summary.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cbexp.metrics.description import RunDescription
from cbexp.metrics.groups import summarize_groups
from cbexp.metrics.quantiles import (
    Quantiles,
    Spread,
    median,
    median_indices,
    quantiles,
    spread,
    spread_of_rate,
)
from cbexp.metrics.records import FINISH_REASONS, RequestRecord, RoundRecord, StepSummary
from cbexp.metrics.roofline import RooflineInputs, mean_decode_context, roofline_fraction
from cbexp.metrics.rounds import times_of

GIB = 2**30
GB = 10**9
COMPILE_STATS = (
    "graphs",
    "replays",
    "recompiles",
    "graph_breaks",
    "skipped_cudagraphs",
    "compile_s",
    "capture_s",
    "compile_cache_bytes",
    "device_idle_share",
    "mean_logprob_error",
    "max_logprob_error",
    "mean_logit_error",
    "max_logit_error",
)


def summarize_run(
    description: RunDescription,
    rounds: Sequence[RoundRecord],
    requests: Sequence[RequestRecord],
    durations_s: Mapping[str, float],
    roofline: RooflineInputs | None,
    warnings: Sequence[str],
    compile_stats: Mapping[str, Any],
    idle: Sequence[Mapping[str, Any]] = (),
    rescoring: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of summary.json: plain JSON values over the timed rounds; of warmup only its number is there.

    Rules: a figure over rounds is the median (of an even number: the mean of the middle two) with its range
    (`relative_half_range` = (max - min) / 2 / median). A rate is that of the median round by wall time. Percentiles
    of requests are over all requests of the timed rounds; those of decode steps are the median of the rounds'
    percentiles. `durations_s` are seconds outside of timing, by name (load, compile, warmup). `compile_stats` is what
    the driver counted over the whole run, warmup included: `COMPILE_STATS`, of which what it lacks is None. `idle` has
    the settings that changed nothing, each with its value and the reason. `groups` is as `summarize_groups` says,
    `rescoring` as it is.

    Keys that scripts of this field read:
        backend: the driver (sync, manager, generate, vllm). compile_mode, attn_impl, lora_adapter: as resolved.
        n_prompts: prompts a round, each with `num_generations` requests. max_new_tokens: the limit of a request.
        wall_times_s: seconds of each timed round; median_wall_s: their median.
        n_decoded_tokens: completion tokens of the median round, counted (EOS included).
        decode_tps: n_decoded_tokens / median_wall_s, prefill time included.
        peak_memory_gb: the largest peak of allocated device memory in 10^9 bytes; None without a GPU.

    Raises:
        ValueError: there is no timed round, or two rounds have the same index.
    """
    timed = [record for record in rounds if not record.is_warmup]
    if not timed:
        raise ValueError("a run without a timed round has no summary")
    if len({record.round_index for record in rounds}) < len(rounds):
        raise ValueError("two rounds have the same round_index, so that their requests cannot be kept apart")
    timed_indices = {record.round_index for record in timed}
    timed_requests = [request for request in requests if request.round_index in timed_indices]
    return {
        "status": "completed",
        **description.to_dict(),
        **_script_keys(description, timed),
        "num_warmup_rounds": len(rounds) - len(timed),
        "num_rounds": len(timed),
        "durations_s": dict(durations_s),
        **_throughput(timed),
        **_outcomes(timed, timed_requests, description),
        "groups": _groups(timed, timed_requests, description),
        **_latencies(timed_requests),
        **_steps(timed),
        **{name: compile_stats.get(name) for name in COMPILE_STATS},
        **_memory(timed),
        "bandwidth_bytes_per_s": None if roofline is None else roofline.bandwidth_bytes_per_s,
        **_roofline(timed, timed_requests, roofline),
        **_determinism(timed, timed_requests, description),
        "rescoring": None if rescoring is None else dict(rescoring),
        "settings_without_effect": list(idle),
        "warnings": list(warnings),
    }


def _script_keys(description: RunDescription, timed: Sequence[RoundRecord]) -> dict[str, Any]:
    walls_s = [record.wall_s for record in timed]
    middle = [timed[i].num_output_tokens for i in median_indices(walls_s)]
    num_tokens = sum(middle) / len(middle)
    peak_gib = _peak(timed, "peak_allocated_gib")
    return {
        "n_prompts": description.num_prompts,
        "n_decoded_tokens": int(num_tokens) if num_tokens.is_integer() else num_tokens,
        "wall_times_s": walls_s,
        "median_wall_s": median(walls_s),
        "decode_tps": num_tokens / median(walls_s),
        "peak_memory_gb": None if peak_gib is None else peak_gib * GIB / GB,
    }


def _throughput(timed: Sequence[RoundRecord]) -> dict[str, Any]:
    walls_s = [record.wall_s for record in timed]

    def rate(amount: Callable[[RoundRecord], int]) -> dict[str, float]:
        return asdict(spread_of_rate([amount(record) for record in timed], walls_s))

    return {
        "wall_s": asdict(spread(walls_s)),
        "output_tokens_per_s": rate(lambda record: record.num_output_tokens),
        "total_tokens_per_s": rate(lambda record: record.num_prompt_tokens + record.num_output_tokens),
        "requests_per_s": rate(lambda record: record.num_finished),
    }


def _outcomes(
    timed: Sequence[RoundRecord], requests: Sequence[RequestRecord], description: RunDescription
) -> dict[str, Any]:
    """Counts over all timed rounds. `num_short`: finished requests of a fixed-length run below their limit."""
    num_judged = sum(record.num_judged for record in timed)
    num_correct = sum(record.num_correct for record in timed)
    num_short = sum(
        request.is_finished and request.num_tokens < request.max_new_tokens for request in requests
    )
    return {
        "num_requests": len(requests),
        "num_finished": sum(record.num_finished for record in timed),
        "num_failed": sum(record.num_failed for record in timed),
        "num_lost": sum(record.num_lost for record in timed),
        "num_short": num_short if description.is_fixed_length else None,
        "finish_reasons": {
            reason: sum(record.finish_reasons[reason] for record in timed) for reason in FINISH_REASONS
        },
        "num_prompt_tokens": sum(record.num_prompt_tokens for record in timed),
        "num_output_tokens": sum(record.num_output_tokens for record in timed),
        "num_judged": num_judged,
        "num_correct": num_correct,
        "accuracy": num_correct / num_judged if num_judged else None,
    }


def _groups(
    timed: Sequence[RoundRecord], requests: Sequence[RequestRecord], description: RunDescription
) -> dict[str, float] | None:
    by_round = _by_round(timed, requests)
    return summarize_groups(list(by_round.values()), description.num_generations)


def _by_round(
    timed: Sequence[RoundRecord], requests: Sequence[RequestRecord]
) -> dict[int, list[RequestRecord]]:
    by_round: dict[int, list[RequestRecord]] = {record.round_index: [] for record in timed}
    for request in requests:
        by_round[request.round_index].append(request)
    return by_round


def _latencies(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    finished = [request for request in requests if request.is_finished]
    times = {field: times_of(finished, field) for field in ("queue_s", "ttft_s", "tpot_s", "latency_s")}
    lengths = quantiles([request.num_tokens for request in finished])
    return {name: _plain(value) for name, value in {**times, "completion_tokens": lengths}.items()}


def _steps(timed: Sequence[RoundRecord]) -> dict[str, Any]:
    """Medians over the rounds; None where the driver cannot see its steps."""
    seen = [record.steps for record in timed if record.steps is not None]
    decode = [steps.decode_step_s for steps in seen if steps.decode_step_s is not None]

    def over_rounds(value: Callable[[StepSummary], float]) -> float | None:
        return median([value(steps) for steps in seen]) if seen else None

    return {
        "num_steps": over_rounds(lambda steps: steps.num_steps),
        "decode_step_s": {
            p: median([getattr(step, p) for step in decode]) for p in ("mean", "p50", "p90", "p99")
        }
        if decode
        else None,
        "prefill_share": over_rounds(lambda steps: steps.prefill_share),
        "mixed_share": over_rounds(lambda steps: steps.mixed_share),
        "decode_share": over_rounds(lambda steps: steps.decode_share),
        "outside_steps_share": over_rounds(lambda steps: steps.outside_steps_share),
        "occupancy": over_rounds(lambda steps: steps.occupancy),
        "mean_batch": over_rounds(lambda steps: steps.mean_batch),
        "padding_share": over_rounds(lambda steps: steps.padding_share),
        "num_bursts": over_rounds(lambda steps: steps.num_bursts),
        "steps_per_burst": _median_of([steps.steps_per_burst for steps in seen]),
        "tokens_per_burst": _median_of([steps.tokens_per_burst for steps in seen]),
        "mean_cache_used": over_rounds(lambda steps: steps.mean_cache_used),
        "peak_cache_used": max((steps.peak_cache_used for steps in seen), default=None),
    }


def _median_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _memory(timed: Sequence[RoundRecord]) -> dict[str, Any]:
    """The largest peak over the timed rounds."""
    fields = ("peak_allocated_gib", "peak_reserved_gib", "peak_host_gib")
    return {field: _peak(timed, field) for field in fields}


def _peak(timed: Sequence[RoundRecord], field: str) -> float | None:
    peaks = [getattr(record.memory, field) for record in timed if record.memory is not None]
    return max((peak for peak in peaks if peak is not None), default=None)


def _roofline(
    timed: Sequence[RoundRecord], requests: Sequence[RequestRecord], inputs: RooflineInputs | None
) -> dict[str, float | None]:
    """Of the mean decode step: its batch times the mean context gives the distinct keys and values read."""
    summaries = [record.steps for record in timed if record.steps is not None]
    decode = [
        (steps.mean_decode_batch, steps.decode_step_s.mean)
        for steps in summaries
        if steps.mean_decode_batch is not None and steps.decode_step_s is not None
    ]
    context = None if inputs is None else mean_decode_context(requests, inputs)
    fraction = None
    if inputs is not None and decode and context is not None:
        batch = median([batch for batch, _ in decode])
        step_s = median([step_s for _, step_s in decode])
        step_bytes = inputs.step_bytes(batch, context)
        fraction = roofline_fraction(step_bytes, inputs.bandwidth_bytes_per_s, step_s)
    return {"mean_decode_context": context, "roofline_fraction": fraction}


def _determinism(
    timed: Sequence[RoundRecord], requests: Sequence[RequestRecord], description: RunDescription
) -> dict[str, Any]:
    """Whether every timed round gave the same completions; None of a single round, and where rounds are sampled.

    `num_differing_requests`: requests, by their place in the round, whose completions are not all equal.
    """
    if len(timed) < 2 or description.do_sample:
        return {"are_rounds_identical": None, "num_differing_requests": None}
    by_round = _by_round(timed, requests).values()
    digests = [[request.completion_digest for request in own] for own in by_round]
    num_differing = sum(len(set(place)) > 1 for place in zip(*digests, strict=True))
    is_same = len({record.completions_digest for record in timed}) == 1
    return {"are_rounds_identical": is_same, "num_differing_requests": num_differing}


def _plain(value: Quantiles | Spread | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)
