"""Every formula of the records with numbers worked by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from cbexp import metrics
from cbexp.engine import Completion, FinishReason, RequestTimings, StepInfo, StepKind
from cbexp.metrics import MemoryUse, RequestRecord, RoundRecord, RunDescription

DESCRIPTION = RunDescription(
    name="default",
    model="tiny",
    dataset="arithmetic",
    backend="sync",
    device="cpu",
    dtype="float32",
    compile_mode="eager",
    fusion="none",
    batch_shape="buckets",
    attn_impl="paged|sdpa",
    lora_adapter=None,
    num_prompts=2,
    num_generations=1,
    max_new_tokens=4,
    has_limits_per_prompt=False,
    is_fixed_length=False,
    workload_hash="abc",
)


def completion(
    request_id: str = "req_0",
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    ids: tuple[int, ...] = (5, 6, 7, 8),
    reason: FinishReason = "eos",
    times: tuple[float, float | None, float | None, float | None] = (10.0, 10.5, 11.0, 14.0),
    error: str | None = None,
) -> Completion:
    return Completion(request_id, prompt_ids, ids, reason, RequestTimings(*times), error)


def step(
    kind: StepKind, start_s: float, end_s: float, num_requests: int = 2, num_tokens: int = 2, **changes: float
) -> StepInfo:
    info = StepInfo(kind, 1, num_requests, num_tokens, 0, None, start_s, end_s, 0, 0, 0.5)
    return dataclasses.replace(info, **changes)


def one_request(**changes: object) -> RequestRecord:
    record = metrics.summarize_requests(0, {"req_0": completion()}, ["req_0"], [True], [4])[0]
    return dataclasses.replace(record, **changes)


def one_round(index: int, wall_s: float, requests: list[RequestRecord], **options: object) -> RoundRecord:
    numbered = [dataclasses.replace(request, round_index=index) for request in requests]
    is_warmup, steps, memory = (options.get(key) for key in ("is_warmup", "steps", "memory"))
    return metrics.summarize_round(
        index, bool(is_warmup), 100.0, 100.0 + wall_s, numbered, steps or [], memory
    )


def one_run(
    rounds: list[RoundRecord], requests: list[RequestRecord] | list[list[RequestRecord]], **options: Any
) -> dict:
    """A summary of rounds with the same requests, or with those of each timed round."""
    timed = [record for record in rounds if not record.is_warmup]
    each = requests if requests and isinstance(requests[0], list) else [requests] * len(timed)
    numbered = [
        dataclasses.replace(request, round_index=record.round_index)
        for record, own in zip(timed, each, strict=True)
        for request in own
    ]
    description, roofline = options.pop("description", DESCRIPTION), options.pop("roofline", None)
    stats = options.pop("compile_stats", {})
    durations_s = {"load": 1.5, "warmup": 2.0}
    return metrics.summarize_run(
        description, rounds, numbered, durations_s, roofline, ["be careful"], stats, **options
    )


# Percentiles and spreads


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10.0), (25, 20.0), (50, 30.0), (90, 46.0), (99, 49.6), (100, 50.0)]
)
def test_percentile_interpolates_between_the_nearest_ranks(percent, expected):
    assert metrics.percentile([50.0, 10.0, 40.0, 20.0, 30.0], percent) == pytest.approx(expected)
    assert metrics.percentile([7.0], percent) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_none(values, percent):
    with pytest.raises(ValueError, match="percent"):
        metrics.percentile(values, percent)


def test_median_of_an_even_number_is_the_mean_of_the_middle_two():
    assert metrics.median([8.0, 1.0, 2.0, 4.0]) == 3.0
    assert metrics.median([9.0, 1.0, 2.0]) == 2.0


def test_spread_has_the_range_and_its_relative_half():
    assert dataclasses.astuple(metrics.spread([10.0, 12.0, 9.0])) == (10.0, 9.0, 12.0, pytest.approx(0.15))
    assert metrics.spread([0.0, 0.0]).relative_half_range == 0


def test_rate_is_that_of_the_median_round_by_wall_time():
    spread = metrics.spread_of_rate([100, 90, 120], [2.0, 1.0, 4.0])
    assert dataclasses.astuple(spread) == (50.0, 30.0, 90.0, pytest.approx((90 - 30) / 2 / 50))
    middle_two = metrics.spread_of_rate([100, 100, 100, 100], [1.0, 4.0, 3.0, 9.0])
    assert middle_two.median == pytest.approx(200 / 7)


# Requests


def test_request_times_count_from_submission():
    record = one_request()
    assert (record.queue_s, record.ttft_s, record.latency_s) == (0.5, 1.0, 4.0)
    assert record.tpot_s == pytest.approx((4.0 - 1.0) / 3)
    assert (record.num_prompt_tokens, record.num_tokens, record.verdict) == (3, 4, True)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"ids": (5,)}, (0.5, 1.0, None, 4.0)),  # a single token has no gap to measure
        ({"ids": (), "reason": "failed", "times": (10.0, None, None, None), "error": "no room"}, (None,) * 4),
    ],
)
def test_request_without_a_time_has_none(changes, times):
    (record,) = metrics.summarize_requests(0, {"r": completion(**changes)}, ["r"], [None], [4])
    assert (record.queue_s, record.ttft_s, record.tpot_s, record.latency_s) == times
    assert (record.error, record.is_finished) == (changes.get("error"), "error" not in changes)


def test_missing_completion_is_recorded_as_lost_in_its_place():
    records = metrics.summarize_requests(3, {"b": completion("b")}, ["a", "b"], [None, False], [4, 4])
    assert [(record.request_id, record.finish_reason) for record in records] == [("a", "lost"), ("b", "eos")]
    assert records[0].error == "no completion came back"
    assert {record.round_index for record in records} == {3}


def test_verdicts_must_be_parallel_and_completions_known():
    with pytest.raises(ValueError, match="zip"):
        metrics.summarize_requests(0, {}, ["a", "b"], [None], [4, 4])
    with pytest.raises(ValueError, match="not submitted: x"):
        metrics.summarize_requests(0, {"x": completion("x")}, ["a"], [None], [4])


def test_completion_rows_hold_what_came_back_in_order():
    completions = {"b": completion("b", ids=(9,))}
    (row,) = metrics.summarize_completions(1, completions, ["a", "b"], [None, "nine"], [None, True])
    assert row == {
        "round_index": 1,
        "request_id": "b",
        "finish_reason": "eos",
        "verdict": True,
        "text": "nine",
        "completion_ids": [9],
        "prompt_ids": [1, 2, 3],
    }


def test_digest_depends_on_ids_order_and_reason():
    a, b = one_request(), one_request(completion_digest=metrics.digest_ids([5, 67, 8]))
    assert metrics.digest_ids([5, 6, 7]) != metrics.digest_ids([5, 67])
    assert metrics.digest_ids([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    rounds = ([a, b], [b, a], [a], [a, dataclasses.replace(b, finish_reason="length")])
    assert len({metrics.digest_completions(requests) for requests in rounds}) == 4
    assert metrics.digest_completions([a, b]) == metrics.digest_completions([a, b])


# Steps


def test_a_steps_row_counts_from_the_start_of_the_round_and_has_the_durations_in_place_of_the_end():
    (row,) = metrics.step_rows(2, 100.0, [step("decode", 100.5, 101.25, num_finished=1)])
    assert list(row.items()) == [
        ("round_index", 2), ("step_index", 0), ("kind", "decode"), ("num_steps", 1), ("num_requests", 2),
        ("num_tokens", 2), ("num_padding", 0), ("bucket", None), ("start_s", 0.5), ("duration_s", 0.75),
        ("num_waiting", 0), ("num_finished", 1), ("cache_used_fraction", 0.5),
    ]  # fmt: skip


def test_shares_of_time_add_up_to_the_wall_time_and_cache_use_is_weighed_by_it():
    steps = [
        step("prefill", 0.0, 1.0, cache_used_fraction=0.2),
        step("mixed", 1.0, 1.5, cache_used_fraction=0.4),
        step("decode", 2.0, 7.0, cache_used_fraction=0.6),
    ]
    summary = metrics.summarize_steps(steps, wall_s=10.0)
    assert (summary.prefill_share, summary.mixed_share, summary.decode_share) == (0.1, 0.05, 0.5)
    assert summary.outside_steps_share == pytest.approx(0.35)
    assert (summary.mean_cache_used, summary.peak_cache_used) == (pytest.approx(3.4 / 6.5), 0.6)


def test_decode_step_times_count_each_step_of_a_burst():
    steps = [step("prefill", 0.0, 9.0), step("decode", 0.0, 1.0), step("decode", 0.0, 1.5, num_steps=3)]
    times = metrics.summarize_steps(steps, wall_s=20.0).decode_step_s
    assert (times.mean, times.p50, times.min, times.max) == (0.625, 0.5, 0.5, 1.0)
    assert times.p90 == pytest.approx(0.5 + 0.5 * 0.7)


def test_batch_occupancy_and_padding():
    steps = [
        step("prefill", 0.0, 1.0, num_requests=4, num_tokens=90, num_padding=10),
        step("decode", 1.0, 2.0, num_requests=4, num_tokens=8, num_steps=2),
        step("decode", 2.0, 3.0, num_requests=1, num_tokens=1, num_padding=3),
    ]
    summary = metrics.summarize_steps(steps, wall_s=3.0)
    assert (summary.num_steps, summary.mean_batch, summary.peak_batch) == (4, 13 / 4, 4)
    assert summary.occupancy == pytest.approx(13 / 16)
    assert summary.mean_decode_batch == pytest.approx(3.0)
    assert summary.padding_share == pytest.approx(13 / (99 + 13))


def test_bursts_count_the_rows_that_were_still_active():
    steps = [
        step("prefill", 0.0, 1.0, num_requests=4, num_tokens=90),
        step("decode", 1.0, 2.0, num_requests=4, num_tokens=20, num_steps=8, num_padding=12),
        step("decode", 2.0, 3.0, num_requests=1, num_tokens=2, num_steps=2),
    ]
    summary = metrics.summarize_steps(steps, wall_s=3.0)
    assert (summary.num_bursts, summary.steps_per_burst, summary.tokens_per_burst) == (2, 5.0, 11.0)
    assert summary.mean_decode_batch == pytest.approx(22 / 10)
    assert (summary.peak_batch, summary.mean_batch) == (4, pytest.approx(26 / 11))
    assert summary.occupancy == pytest.approx(26 / 44)


def test_no_steps_have_no_summary_and_a_prefill_alone_has_no_decode_figures():
    assert metrics.summarize_steps([], wall_s=1.0) is None
    summary = metrics.summarize_steps([step("prefill", 0.0, 1.0)], wall_s=1.0)
    assert {summary.decode_step_s, summary.mean_decode_batch, summary.tokens_per_burst} == {None}


# Rounds


def test_round_counts_tokens_of_finished_completions_only():
    completions = {
        "a": completion("a", ids=(5, 6, 7)),
        "b": completion("b", ids=(5,) * 5, reason="length", prompt_ids=(1,)),
        "c": completion("c", ids=(5, 6), reason="failed", error="boom"),
    }
    verdicts = [True, False, None, None]
    requests = metrics.summarize_requests(0, completions, ["a", "b", "c", "d"], verdicts, [4, 5, 4, 4])
    record = metrics.summarize_round(0, False, 100.0, 104.0, requests, [], None)
    assert (record.num_requests, record.num_finished, record.num_failed, record.num_lost) == (4, 2, 1, 1)
    assert record.finish_reasons == {"eos": 1, "length": 1, "failed": 1, "lost": 1}
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_discarded_tokens) == (4, 8, 2)
    assert (record.output_tokens_per_s, record.total_tokens_per_s, record.requests_per_s) == (2.0, 3.0, 0.5)
    assert (record.num_judged, record.num_correct, record.accuracy, record.steps) == (2, 1, 0.5, None)
    assert one_round(0, 1.0, [one_request(verdict=None)]).accuracy is None


def test_round_percentiles_are_over_finished_requests():
    failed = one_request(ttft_s=99.0, finish_reason="failed")
    record = one_round(0, 4.0, [one_request(), one_request(ttft_s=3.0), failed])
    assert (record.ttft_s.p50, record.ttft_s.max) == (2.0, 3.0)


def test_round_without_duration_is_refused():
    with pytest.raises(ValueError, match="not after its start"):
        one_round(0, 0.0, [one_request()])


def test_records_are_plain_json():
    memory = MemoryUse(1.0, 2.0, 3.0, 4.0, 5.0)
    record = one_round(0, 4.0, [one_request()], steps=[step("decode", 100.0, 101.0)], memory=memory)
    read_back = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert read_back == record.to_dict()
    assert read_back["steps"]["decode_step_s"]["p50"] == 1.0
    assert read_back["memory"]["peak_reserved_gib"] == 4.0


# Runs


def test_summary_takes_the_median_round_and_ignores_warmup():
    requests = [one_request(), one_request()]
    rounds = [one_round(-1, 50.0, requests, is_warmup=True)]
    rounds += [one_round(index, wall_s, requests) for index, wall_s in enumerate([4.0, 1.0, 2.0])]
    summary = one_run(rounds, requests)
    assert (summary["num_warmup_rounds"], summary["num_rounds"]) == (1, 3)
    assert summary["wall_times_s"] == [4.0, 1.0, 2.0]
    assert (summary["median_wall_s"], summary["n_decoded_tokens"], summary["decode_tps"]) == (2.0, 8, 4.0)
    assert list(summary["output_tokens_per_s"].values()) == [4.0, 2.0, 8.0, 0.75]
    assert summary["total_tokens_per_s"]["median"] == (8 + 6) / 2
    assert summary["requests_per_s"]["median"] == 1.0
    assert (summary["num_requests"], summary["num_output_tokens"]) == (6, 24)


def test_decode_tps_is_tokens_over_median_wall_of_an_even_number_of_rounds():
    short, long = [one_request(num_tokens=3)], [one_request(num_tokens=10)]
    walls = [(1.0, short), (2.0, short), (4.0, long), (9.0, long)]
    rounds = [one_round(index, wall_s, requests) for index, (wall_s, requests) in enumerate(walls)]
    summary = one_run(rounds, [short, short, long, long])
    assert (summary["median_wall_s"], summary["n_decoded_tokens"]) == (3.0, 6.5)
    assert summary["decode_tps"] == pytest.approx(6.5 / 3.0)
    assert summary["output_tokens_per_s"]["median"] == pytest.approx(summary["decode_tps"])


def test_summary_has_the_keys_that_scripts_read():
    idle = [{"setting": "cache.page_size", "value": 8, "reason": "nothing"}]
    summary = one_run([one_round(0, 2.0, [one_request()])], [one_request()], idle=idle)
    keys = {
        "backend": "sync",
        "compile_mode": "eager",
        "attn_impl": "paged|sdpa",
        "lora_adapter": None,
        "n_prompts": 2,
        "n_decoded_tokens": 4,
        "wall_times_s": [2.0],
        "median_wall_s": 2.0,
        "decode_tps": 2.0,
        "max_new_tokens": 4,
        "peak_memory_gb": None,
        "durations_s": {"load": 1.5, "warmup": 2.0},
        "warnings": ["be careful"],
        "settings_without_effect": idle,
    }
    assert {key: summary[key] for key in keys} == keys
    json.dumps(summary, allow_nan=False)


def test_summary_pools_requests_and_accuracy_over_timed_rounds():
    right, wrong = one_request(latency_s=1.0), one_request(verdict=False, latency_s=3.0)
    rounds = [
        one_round(-1, 1.0, [wrong], is_warmup=True),
        one_round(0, 1.0, [right, right]),
        one_round(1, 1.0, [right, wrong]),
    ]
    summary = one_run(rounds, [[right, right], [right, wrong]])
    assert (summary["num_judged"], summary["num_correct"], summary["accuracy"]) == (4, 3, 0.75)
    assert (summary["latency_s"]["p50"], summary["latency_s"]["max"]) == (1.0, 3.0)
    assert summary["completion_tokens"]["mean"] == 4.0


def test_fixed_length_run_reports_short_requests():
    fixed = dataclasses.replace(DESCRIPTION, is_fixed_length=True)
    short, own_limit = one_request(num_tokens=3), one_request(num_tokens=3, max_new_tokens=3)
    for last, description, expected in ((short, fixed, 1), (own_limit, fixed, 0), (short, DESCRIPTION, None)):
        requests = [one_request(num_tokens=4), last]
        summary = one_run([one_round(0, 1.0, requests)], requests, description=description)
        assert (summary["num_short"], summary["is_fixed_length"]) == (expected, description is fixed)


def test_failures_are_counted_by_reason():
    requests = [one_request(), one_request(finish_reason="lost"), one_request(finish_reason="failed")]
    summary = one_run([one_round(0, 1.0, requests), one_round(1, 1.0, requests)], requests)
    assert (summary["num_failed"], summary["num_lost"], summary["num_finished"]) == (2, 2, 2)
    assert summary["finish_reasons"] == {"eos": 2, "length": 0, "failed": 2, "lost": 2}


def test_identical_rounds_are_told_from_differing_ones():
    a, b = one_request(), one_request(completion_digest=metrics.digest_ids([1]))
    for second, expected in (([a, b], (True, 0)), ([a, a], (False, 1))):
        summary = one_run([one_round(0, 1.0, [a, b]), one_round(1, 1.0, second)], [[a, b], second])
        assert (summary["are_rounds_identical"], summary["num_differing_requests"]) == expected
    assert one_run([one_round(0, 1.0, [a])], [a])["are_rounds_identical"] is None


def test_step_figures_are_medians_over_rounds():
    requests = [one_request()]
    took = enumerate([(1.0, 0.1), (2.0, 0.9), (6.0, 0.2)])
    steps = {i: [step("decode", 100.0, 100.0 + s, cache_used_fraction=cache)] for i, (s, cache) in took}
    summary = one_run([one_round(i, 10.0, requests, steps=own) for i, own in steps.items()], requests)
    assert summary["decode_step_s"] == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert (summary["decode_share"], summary["peak_cache_used"]) == (pytest.approx(0.2), 0.9)
    without = one_run([one_round(0, 1.0, requests)], requests)
    assert {without[key] for key in ("decode_step_s", "decode_share", "peak_cache_used")} == {None}


def test_peak_memory_is_the_largest_of_the_timed_rounds_in_decimal_gigabytes():
    requests = [one_request()]
    rounds = [
        one_round(-1, 1.0, requests, is_warmup=True, memory=MemoryUse(0, 0, 99.0, 99.0, 1.0)),
        one_round(0, 1.0, requests, memory=MemoryUse(0, 0, 2.0, 3.0, 1.0)),
        one_round(1, 1.0, requests, memory=MemoryUse(0, 0, 1.0, 4.0, 1.0)),
    ]
    summary = one_run(rounds, requests)
    assert (summary["peak_allocated_gib"], summary["peak_reserved_gib"]) == (2.0, 4.0)
    assert summary["peak_memory_gb"] == pytest.approx(2 * 2**30 / 1e9)


def test_run_without_timed_round_or_with_equal_indices_is_refused():
    record = one_round(0, 1.0, [one_request()], is_warmup=True)
    with pytest.raises(ValueError, match="timed round"):
        one_run([record], [])
    with pytest.raises(ValueError, match="same round_index"):
        one_run([record, one_round(0, 1.0, [one_request()])], [])


def test_summary_has_what_the_driver_counted_and_nothing_else():
    stats = {"graphs": 9, "replays": 70, "compile_s": 1.5, "device_idle_share": 0.02}
    requests = [one_request()]
    summary = one_run([one_round(0, 1.0, requests)], requests, compile_stats=stats | {"unknown": 1})
    assert {name: summary[name] for name in metrics.COMPILE_STATS} == {
        **dict.fromkeys(metrics.COMPILE_STATS),
        **stats,
    }
    assert {"recompiles", "graph_breaks", "max_logprob_error", "compile_cache_bytes"} <= {
        *metrics.COMPILE_STATS
    }
    assert "unknown" not in summary


# Roofline


def test_roofline_fraction_with_worked_numbers():
    # 8.04 GB of weights and 2.37 GB of keys and values at 4.3 TB/s take 2.42 ms: of a step of 4.84 ms, one half.
    assert metrics.roofline_fraction(8.04e9 + 2.366e9, 4.3e12, 4.84e-3) == pytest.approx(0.5, rel=1e-3)


def test_mean_context_counts_prompt_and_tokens_so_far():
    # Prompt 10 and 4 tokens: steps of tokens 1, 2, 3 read 11, 12, 13. Prompt 20 and 2 tokens: one step reads 21.
    lengths = ((10, 4), (20, 2), (99, 1))
    requests = [one_request(num_prompt_tokens=prompt, num_tokens=new) for prompt, new in lengths]
    assert metrics.mean_decode_context(requests) == pytest.approx((11 + 12 + 13 + 21) / 4)
    assert metrics.mean_decode_context([one_request(num_tokens=1)]) is None


def test_run_has_a_roofline_fraction_when_a_bandwidth_is_given():
    requests = [one_request(num_prompt_tokens=10, num_tokens=4)] * 2
    record = one_round(0, 4.0, requests, steps=[step("decode", 100.0, 103.0, num_steps=3, num_tokens=6)])
    inputs = metrics.RooflineInputs(2000.0, lambda batch, context: 760 + batch * context * 10)
    # A step of 1 s reads 760 + 2 requests x 12 tokens x 10 = 1000 bytes, which take 0.5 s.
    summary = one_run([record], requests, roofline=inputs)
    assert (summary["roofline_fraction"], summary["bandwidth_bytes_per_s"]) == (pytest.approx(0.5), 2000.0)
    without = one_run([record], requests)
    assert (without["roofline_fraction"], without["bandwidth_bytes_per_s"]) == (None, None)


# Identity of the workload


def test_workload_hash_is_stable_and_sees_every_part():
    work = ([[1, 2], [3]], 512, {"ignore_eos": True, "eos_token_ids": [0]})
    reordered = ([(1, 2), (3,)], 512, {"eos_token_ids": [0], "ignore_eos": True})
    assert metrics.workload_hash(*work) == metrics.workload_hash(*reordered)
    assert metrics.workload_hash([[1]], 2, {}) == (
        "ad3968f759cb2d105730fcae4cd1025d824a3d928f16e5872481b9c0a9a61e8e"
    )
    others = [([[1], [2, 3]], *work[1:]), (work[0], 511, work[2]), (work[0], 512, {"ignore_eos": False})]
    assert metrics.workload_hash(*work) not in {metrics.workload_hash(*other) for other in others}
