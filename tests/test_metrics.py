"""Every formula of the records with numbers worked by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from cbexp import metrics
from cbexp.engine.types import Completion, RequestTimings, StepInfo
from cbexp.metrics import MemoryUse
from tests.metrics_fixtures import describe_run

DESCRIPTION = describe_run(num_generations=2)


def completion(
    ids=(5, 6, 7, 8), reason="eos", prompt_ids=(1, 2, 3), times=(10.0, 10.5, 11.0, 14.0), error=None
):
    return Completion("id", prompt_ids, ids, reason, RequestTimings(*times), error)


def step(kind, start_s, end_s, num_requests=2, num_tokens=2, **changes):
    info = StepInfo(kind, 1, num_requests, num_tokens, 0, None, start_s, end_s, 0, 0, 0.5)
    return dataclasses.replace(info, **changes)


# Two requests that end, one that fails and one that never comes back; a burst in which three of four requests end.
COMPLETIONS = {
    "a": completion((5, 6, 7)),
    "b": completion((5,) * 5, "length", prompt_ids=(1,), times=(10.0, 11.0, 12.0, 16.0)),
    "c": completion((5, 6), "failed", times=(10.0, None, None, None), error="boom"),
}
STEPS = [
    step("prefill", 100.0, 101.0, 4, 90, num_padding=10, cache_used_fraction=0.2),
    step("mixed", 101.0, 101.5, 4, 20),
    step("decode", 102.0, 103.0, 4, 20, num_steps=8, num_padding=12, bucket=4, cache_used_fraction=0.6),
    step("decode", 103.0, 103.5, 1, 2, num_steps=2, num_finished=1),
]

SHARES = {"prefill_share": 0.2, "mixed_share": 0.1, "decode_share": 0.3}
SHARES |= {"outside_steps_share": pytest.approx(0.4)}
SHARES |= {"num_bursts": 2, "steps_per_burst": 5.0, "tokens_per_burst": 11.0}


def requests_of(index, completions=COMPLETIONS):
    verdicts, limits = [True, False, None, None], [4, 5, 4, 4]
    return metrics.summarize_requests(index, completions, ["a", "b", "c", "d"], verdicts, limits)


def one_request(**changes):
    record = metrics.summarize_requests(0, {"r": completion()}, ["r"], [True], [4])[0]
    return dataclasses.replace(record, **changes)


def one_round(index, wall_s, requests, is_warmup=False, steps=(), memory=None):
    return metrics.summarize_round(index, is_warmup, 100.0, 100.0 + wall_s, requests, steps, memory)


def one_run(*rounds, **description):
    """The summary of timed rounds: their seconds and their requests."""
    records = [one_round(index, *timed) for index, timed in enumerate(rounds)]
    indexed = [(index, request) for index, (_, own) in enumerate(rounds) for request in own]
    requests = [dataclasses.replace(request, round_index=index) for index, request in indexed]
    described = dataclasses.replace(DESCRIPTION, **description)
    return metrics.summarize_run(described, records, requests, {}, None, [], {})


# Percentiles and spreads


def test_percentile_interpolates_between_the_nearest_ranks():
    values = [50.0, 10.0, 40.0, 20.0, 30.0]
    found = [metrics.percentile(values, percent) for percent in (0, 25, 50, 90, 99, 100)]
    assert found == pytest.approx([10.0, 20.0, 30.0, 46.0, 49.6, 50.0])
    assert metrics.percentile([7.0], 90) == 7.0


def test_spreads():
    found = [
        metrics.spread([10.0, 12.0, 9.0]),
        metrics.spread([8.0, 1.0, 2.0, 4.0]),  # the mean of the middle two
        metrics.spread_of_rate([100, 90, 120], [2.0, 1.0, 4.0]),
        # Of an even number of rounds, by their seconds, the middle two together.
        metrics.spread_of_rate([90, 60, 80, 50], [1.0, 4.0, 3.0, 10.0]),
    ]
    expected = [(10.0, 9.0, 12.0, 0.15), (3.0, 1.0, 8.0, 7 / 6)]
    expected += [(50.0, 30.0, 90.0, 0.6), (20.0, 5.0, 90.0, 2.125)]
    assert [dataclasses.astuple(spread) for spread in found] == [pytest.approx(row) for row in expected]


# Requests


def test_requests_have_their_times_from_submission_on_and_what_is_missing_is_lost():
    a, b, c, d = requests_of(3)
    digest = metrics.digest_ids
    assert dataclasses.astuple(a) == (
        3, "a", "eos", 3, 3, 4, 0.5, 1.0, 1.5, 4.0, True, digest([5, 6, 7]), None,
    )  # fmt: skip
    assert (b.queue_s, b.ttft_s, b.tpot_s, b.latency_s, b.max_new_tokens) == (1.0, 2.0, 1.0, 6.0, 5)
    assert (c.queue_s, c.ttft_s, c.tpot_s, c.latency_s) == (None,) * 4
    assert (c.error, c.is_finished, c.num_tokens) == ("boom", False, 2)
    lost = (3, "d", "lost", 0, 0, 4, None, None, None, None, None, digest([]), "no completion came back")
    assert dataclasses.astuple(d) == lost
    (single,) = metrics.summarize_requests(0, {"r": completion((5,))}, ["r"], [None], [4])
    assert (single.tpot_s, single.latency_s) == (None, 4.0)


def test_completion_rows_hold_what_came_back_in_order():
    came_back = {"b": completion((9,))}
    (row,) = metrics.summarize_completions(1, came_back, ["a", "b"], [None, "nine"], [None, True])
    expected = {"round_index": 1, "request_id": "b", "finish_reason": "eos", "verdict": True, "text": "nine"}
    assert row == expected | {"stop_reason": None} | {"completion_ids": [9], "prompt_ids": [1, 2, 3]}


def test_digest_depends_on_ids_order_and_reason():
    a, b = one_request(), one_request(completion_digest=metrics.digest_ids([5, 67, 8]))
    assert metrics.digest_ids([5, 6, 7]) != metrics.digest_ids([5, 67])
    assert metrics.digest_ids([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    others = [[b, a], [a], [a, dataclasses.replace(b, finish_reason="length")]]
    assert metrics.digest_completions([a, b]) not in map(metrics.digest_completions, others)


# Steps and rounds


def test_a_steps_row_counts_from_the_start_of_the_round_and_has_the_durations_in_place_of_the_end():
    row = metrics.step_rows(2, 100.0, STEPS)[2]
    assert list(row.items()) == [
        ("round_index", 2), ("step_index", 2), ("kind", "decode"), ("num_steps", 8), ("num_requests", 4),
        ("num_tokens", 20), ("num_padding", 12), ("bucket", 4), ("start_s", 2.0), ("duration_s", 1.0),
        ("num_waiting", 0), ("num_finished", 0), ("cache_used_fraction", 0.6),
    ]  # fmt: skip


def test_record_of_a_round():
    memory = MemoryUse(1.0, 2.0, 3.0, 4.0, 5.0)
    requests = requests_of(0)
    record = one_round(0, 5.0, requests, steps=STEPS, memory=memory).to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record

    def quantiles(*values: float) -> Any:
        return pytest.approx(dict(zip(("mean", "min", "p50", "p90", "p99", "max"), values, strict=True)))

    assert record.pop("steps") == SHARES | {
        "num_steps": 12,
        "decode_step_s": quantiles(0.15, 0.125, 0.125, 0.25, 0.25, 0.25),  # 8 of 1/8 s, 2 of 1/4 s
        "mean_decode_batch": pytest.approx(22 / 10),  # those still active: tokens a step
        "mean_batch": pytest.approx((4 + 4 + 22) / 12),
        "peak_batch": 4,
        "occupancy": pytest.approx(30 / 48),
        "padding_share": pytest.approx(22 / (132 + 22)),
        "mean_cache_used": pytest.approx((1.0 * 0.2 + 0.5 * 0.5 + 1.0 * 0.6 + 0.5 * 0.5) / 3.0),  # by time
        "peak_cache_used": 0.6,
    }
    counts = {"num_requests": 4, "num_finished": 2, "num_failed": 1, "num_lost": 1}
    # The tokens of the failed one are discarded, and it is in no rate and no percentile.
    counts |= {"num_prompt_tokens": 4, "num_output_tokens": 8, "num_discarded_tokens": 2}
    assert record == counts | {
        "round_index": 0,
        "is_warmup": False,
        "wall_s": 5.0,
        "finish_reasons": {"eos": 1, "stop": 0, "length": 1, "failed": 1, "lost": 1},
        "output_tokens_per_s": 1.6,
        "total_tokens_per_s": 2.4,
        "requests_per_s": 0.4,
        "num_judged": 2,
        "num_correct": 1,
        "accuracy": 0.5,
        "queue_s": quantiles(0.75, 0.5, 0.75, 0.95, 0.995, 1.0),
        "ttft_s": quantiles(1.5, 1.0, 1.5, 1.9, 1.99, 2.0),
        "tpot_s": quantiles(1.25, 1.0, 1.25, 1.45, 1.495, 1.5),
        "latency_s": quantiles(5.0, 4.0, 5.0, 5.8, 5.98, 6.0),
        "memory": memory.to_dict(),
        "completions_digest": metrics.digest_completions(requests),
    }


# Runs


def test_summary_of_a_run():
    """Medians over three timed rounds of 5, 4 and 8 s; the last one gave another answer; warmup counts nowhere."""
    other = COMPLETIONS | {"a": completion((5, 6, 8))}
    requests = [requests_of(index, other if index == 3 else COMPLETIONS) for index in range(4)]
    peaks = [(99.0, 99.0), (2.0, 3.0), (1.0, 4.0), (1.0, 1.0)]
    steps = [STEPS, STEPS, STEPS, [step("decode", 100.0, 101.0, cache_used_fraction=0.9)]]
    rounds = [
        one_round(i, wall_s, own, is_warmup=i == 0, steps=steps[i], memory=MemoryUse(0, 0, *peaks[i], 1.0))
        for i, (wall_s, own) in enumerate(zip((50.0, 5.0, 4.0, 8.0), requests, strict=True))
    ]
    # A step of 0.15 s reads 100 bytes of weights and 10 for each token of each request's context.
    roofline = metrics.RooflineInputs(2000.0, lambda batch, context: 100 + batch * context * 10)
    context = metrics.mean_decode_context([request for own in requests[1:] for request in own], roofline)
    idle = [{"setting": "x", "value": 1, "reason": "y"}]
    compiled = {"graphs": 9, "replays": 70, "compile_s": 1.5, "device_idle_share": 0.02}
    flat = [request for own in requests for request in own]
    durations_s = {"load": 1.5, "warmup": 2.0}
    summary = metrics.summarize_run(
        DESCRIPTION,
        rounds,
        flat,
        durations_s,
        roofline,
        ["be careful"],
        compiled | {"unknown": 1},
        idle,
        {"kl": 0.1},
    )
    json.dumps(summary, allow_nan=False)
    assert summary.pop("mean_decode_context") == context
    assert summary.pop("roofline_fraction") == pytest.approx((100 + 22 * context) / 2000 / 0.15)
    times = {name: summary.pop(name) for name in ("queue_s", "ttft_s", "tpot_s", "latency_s")}
    assert [times[name]["p50"] for name in times] == [0.75, 1.5, 1.25, 5.0]
    lengths = {"mean": 4.0, "min": 3, "p50": 4.0, "p90": 5.0, "p99": 5.0, "max": 5}
    assert summary.pop("completion_tokens") == lengths

    def spread(*values: float) -> Any:
        return dict(zip(("median", "min", "max", "relative_half_range"), values, strict=True))

    for_others = {"n_prompts": 2, "n_decoded_tokens": 8, "decode_tps": 1.6, "peak_memory_gb": 2 * 2**30 / 1e9}
    counts = {"num_requests": 12, "num_finished": 6, "num_failed": 3, "num_lost": 3, "num_short": None}
    counts |= {"num_prompt_tokens": 12, "num_output_tokens": 24, "num_judged": 6, "num_correct": 3}
    assert summary == DESCRIPTION.to_dict() | for_others | counts | SHARES | {
        "status": "completed",
        "wall_times_s": [5.0, 4.0, 8.0],
        "median_wall_s": 5.0,
        "num_warmup_rounds": 1,
        "num_rounds": 3,
        "durations_s": durations_s,
        "wall_s": spread(5.0, 4.0, 8.0, 0.4),
        "output_tokens_per_s": spread(1.6, 1.0, 2.0, 0.3125),
        "total_tokens_per_s": spread(2.4, 1.5, 3.0, 0.3125),
        "requests_per_s": spread(0.4, 0.25, 0.5, 0.3125),
        "finish_reasons": {"eos": 3, "stop": 0, "length": 3, "failed": 3, "lost": 3},
        "accuracy": 0.5,
        "groups": None,  # one was not judged
        "num_steps": 12,
        "decode_step_s": {"mean": 0.15, "p50": 0.125, "p90": 0.25, "p99": 0.25},
        "occupancy": 0.625,
        "mean_batch": 2.5,
        "padding_share": pytest.approx(1 / 7),
        "mean_cache_used": pytest.approx(1.3 / 3),
        "peak_cache_used": 0.9,
        **dict.fromkeys(metrics.COMPILE_STATS),
        **compiled,
        "peak_allocated_gib": 2.0,
        "peak_reserved_gib": 4.0,
        "peak_host_gib": 1.0,
        "bandwidth_bytes_per_s": 2000.0,
        "are_rounds_identical": False,
        "num_differing_requests": 1,
        "rescoring": {"kl": 0.1},
        "settings_without_effect": idle,
        "warnings": ["be careful"],
    }


def test_groups_of_a_prompt_are_judged_together():
    """Two rounds of two prompts, three completions each: 1 of 3 and 0 of 3 right, then 3 of 3 and 1 of 3."""

    def one(verdicts):
        return (1.0, [one_request(verdict=mark == "x") for mark in verdicts])

    summary = one_run(one("x....."), one("xxx.x."), num_generations=3)
    groups = summary["groups"]
    deviation = (2 / 9) ** 0.5  # of one of three
    assert groups == {
        "num_groups": 4,
        "verdict_mean": pytest.approx((1 / 3 + 0 + 1 + 1 / 3) / 4),
        "verdict_std": pytest.approx((deviation + 0 + 0 + deviation) / 4),
        "all_right_share": 0.25,
        "all_wrong_share": 0.25,
        "pass_at_1": pytest.approx((4 / 6 + 1 / 6) / 2),
        "k": 3,
        # Four of six right: any three have one. One of six: half of the threes have it.
        "pass_at_k": pytest.approx((1 + 1 / 2) / 2),
    }
    assert one_run(one("x..x.."))["groups"] is not None
    assert one_run(one("x..x.."), num_generations=1)["groups"] is None
    assert one_run((1.0, [one_request(verdict=None)] * 6), num_generations=3)["groups"] is None


def test_pass_at_k_is_without_bias():
    """Over all draws of six completions that are right with probability 0.3, by its mean."""
    for k in (1, 2, 5):
        mean = sum(
            math.comb(6, c) * 0.3**c * 0.7 ** (6 - c) * metrics.estimate_pass_at_k(6, c, k) for c in range(7)
        )
        assert mean == pytest.approx(1 - 0.7**k)


def test_decode_tps_is_tokens_over_median_wall_of_an_even_number_of_rounds():
    short, long = [one_request(num_tokens=3)], [one_request(num_tokens=10)]
    summary = one_run((1.0, short), (2.0, short), (4.0, long), (9.0, long))
    assert (summary["median_wall_s"], summary["n_decoded_tokens"]) == (3.0, 6.5)
    assert summary["decode_tps"] == pytest.approx(6.5 / 3.0)
    assert summary["output_tokens_per_s"]["median"] == pytest.approx(summary["decode_tps"])


def test_fixed_length_run_reports_requests_below_their_own_limit():
    requests = [one_request(num_tokens=4), one_request(num_tokens=3)]
    own_limits = [one_request(num_tokens=4), one_request(num_tokens=3, max_new_tokens=3)]
    assert one_run((1.0, requests), is_fixed_length=True)["num_short"] == 1
    assert one_run((1.0, own_limits), is_fixed_length=True)["num_short"] == 0


def test_what_a_driver_does_not_see_is_none():
    requests = [one_request(verdict=None)]
    alone = one_run((1.0, requests))
    missing = ("decode_step_s", "decode_share", "peak_cache_used", "are_rounds_identical", "peak_memory_gb")
    missing += ("mean_decode_context", "roofline_fraction", "bandwidth_bytes_per_s", "accuracy")
    assert {alone[key] for key in missing} == {None}
    again = one_run((1.0, requests), (1.0, requests))
    assert (again["are_rounds_identical"], again["num_differing_requests"]) == (True, 0)
    sampled = one_run((1.0, requests), (1.0, requests), do_sample=True)
    assert sampled["are_rounds_identical"] is None
    prefill = metrics.summarize_steps([step("prefill", 0.0, 1.0)], wall_s=1.0)
    assert (prefill.decode_step_s, prefill.mean_decode_batch, prefill.tokens_per_burst) == (None,) * 3


def test_roofline_with_worked_numbers():
    # 8.04 GB of weights and 2.37 GB of keys and values at 4.3 TB/s take 2.42 ms: of a step of 4.84 ms, one half.
    assert metrics.roofline_fraction(8.04e9 + 2.366e9, 4.3e12, 4.84e-3) == pytest.approx(0.5, rel=1e-3)
    # Prompt 10 and 4 tokens: steps of tokens 1, 2, 3 read 11, 12, 13. Prompt 20 and 2 tokens: one step reads 21.
    lengths = [(10, 4), (20, 2), (99, 1)]
    requests = [one_request(num_prompt_tokens=prompt, num_tokens=tokens) for prompt, tokens in lengths]
    alone = metrics.RooflineInputs(1.0, lambda batch, context: 0.0)
    assert metrics.mean_decode_context(requests, alone) == pytest.approx((11 + 12 + 13 + 21) / 4)
    assert metrics.mean_decode_context(requests[2:], alone) is None
    # Two generations of a prompt of 10, of which 8 are stored once: read in three steps, not in three and one.
    group = [one_request(num_prompt_tokens=10, num_tokens=tokens) for tokens in (4, 2)]
    shared = metrics.RooflineInputs(
        1.0, lambda batch, context: 0.0, 2, lambda prompt_tokens: prompt_tokens - 2
    )
    assert metrics.mean_decode_context(group, shared) == pytest.approx((11 + 12 + 13 + 11 - 8) / 4)


def test_workload_hash_is_stable_and_sees_every_part():
    work = ([[1, 2], [3]], 512, {"ignore_eos": True, "eos_token_ids": [0]})
    reordered = ([(1, 2), (3,)], 512, {"eos_token_ids": [0], "ignore_eos": True})
    assert metrics.workload_hash(*work) == metrics.workload_hash(*reordered)
    recorded = "ad3968f759cb2d105730fcae4cd1025d824a3d928f16e5872481b9c0a9a61e8e"
    assert metrics.workload_hash([[1]], 2, {}) == recorded
    others = [([[1], [2, 3]], *work[1:]), (work[0], 511, work[2]), (work[0], 512, {"ignore_eos": False})]
    assert metrics.workload_hash(*work) not in {metrics.workload_hash(*other) for other in others}
