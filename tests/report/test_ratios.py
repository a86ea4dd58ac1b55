"""Ratios are between runs of the same workload, their intervals by the stated rule."""

from __future__ import annotations

import itertools

import pytest

from cbexp.metrics import spread_of_rate
from cbexp.report import ReportError, format_table, load_runs, run_rows
from cbexp.report.baseline import ratio_between
from cbexp.report.bootstrap import NUM_RESAMPLES, ratio_interval
from cbexp.report.page import build_page
from cbexp.report.run import TimedRound
from tests.report.report_fixtures import OTHER_WORKLOAD, WORKLOAD


def timed(*walls_s, num_tokens=100):
    return [TimedRound(wall_s, num_tokens, {}) for wall_s in walls_s]


@pytest.mark.parametrize(
    ("hashes", "message"), [((WORKLOAD, OTHER_WORKLOAD), "different workloads"), ((None, None), "missing")]
)
def test_ratio_is_refused_unless_the_workloads_are_known_to_be_the_same(make_run, hashes, message):
    one, other = load_runs([make_run(str(index), workload_hash=value) for index, value in enumerate(hashes)])
    with pytest.raises(ReportError, match=message):
        ratio_between(one, other)


# Baselines


def test_the_slowest_run_of_each_workload_is_its_baseline_unless_one_is_named(make_run):
    folders = [
        make_run("slow", ["compile=eager"], walls_s=(2.0, 2.0, 2.0)),
        make_run("fast", ["compile=default"], walls_s=(1.0, 1.0, 1.0)),
        make_run("lone", ["seed=2"], walls_s=(0.1, 0.1, 0.1), workload_hash=OTHER_WORKLOAD),
    ]
    runs = load_runs(folders)
    rows = {row["label"]: row for row in run_rows(runs)}
    assert {label: row["ratio"] for label, row in rows.items()} == {
        "compile=eager": 1.0, "compile=default": pytest.approx(2.0), "seed=2": None,
    }  # fmt: skip
    assert [label for label, row in rows.items() if row["is_baseline"]] == ["compile=eager"]
    named = {row["label"]: row for row in run_rows(runs, "compile=default")}
    assert named["compile=eager"]["ratio"] == pytest.approx(0.5)
    assert named["compile=eager"]["baseline"] == "compile=default"


def test_baseline_is_named_by_some_words_of_its_command(make_run):
    words = ["driver=sync compile=eager", "driver=sync compile=default", "driver=generate compile=eager"]
    folders = [make_run(str(index), overrides.split()) for index, overrides in enumerate(words)]
    runs = load_runs([*folders, make_run("failed", ["seed=1"], status="failed")])
    named = [row["label"] for row in run_rows(runs, "driver=generate") if row["is_baseline"]]
    assert named == ["driver=generate compile=eager"]
    with pytest.raises(ReportError, match="fits several runs of one workload"):
        run_rows(runs, "compile=eager")
    for name in ("compile=nonsense", "seed=1"):
        with pytest.raises(ReportError, match=r"fits no completed run.*driver=sync compile=default"):
            run_rows(runs, name)


def test_run_without_output_is_no_baseline_and_wins_nothing(make_run):
    silent = {"output_tokens_per_s": {"median": 0.0, "min": 0.0, "max": 0.0}}
    runs = load_runs([make_run("1", ["seed=1"]), make_run("2", ["seed=2"], **silent)])
    assert [row["ratio"] for row in run_rows(runs)] == [None, None]
    assert "The only" in build_page(runs)


def test_runs_of_different_workloads_say_why_they_have_no_ratio(make_run):
    runs = load_runs([make_run(name, [f"seed={name}"], workload_hash=name * 64) for name in "12"])
    table = format_table(runs)
    assert table.count("other workload") == 2
    assert "2 different workloads" in table and "no ratio stands between them" in table
    assert build_page(runs).count('<span class="none">other workload</span>') == 2
    assert "other workload" not in format_table(runs[:1])


# Intervals


def test_interval_of_three_rounds_spans_all_pairs_of_rounds():
    interval = ratio_interval(timed(1.0, 1.1, 1.2), timed(2.0, 2.2, 2.6))
    assert interval.low == pytest.approx(2.0 / 1.2)
    assert interval.high == pytest.approx(2.6 / 1.0)


def test_interval_agrees_with_all_resamples_counted_out():
    """Of 3 rounds a side there are 27 x 27 resamples: their exact percentiles, with the medians of `metrics`."""
    walls, base_walls = (1.0, 1.4, 1.5), (2.0, 2.1, 3.0)

    def rates_of(walls):
        drawn = itertools.product(walls, repeat=3)
        return [spread_of_rate([100] * 3, list(some)).median for some in drawn]

    ratios = sorted(one / other for one in rates_of(walls) for other in rates_of(base_walls))
    interval = ratio_interval(timed(*walls), timed(*base_walls))
    assert interval.low == pytest.approx(ratios[round(0.025 * len(ratios))])
    assert interval.high == pytest.approx(ratios[round(0.975 * len(ratios)) - 1])


def test_interval_of_even_numbers_of_rounds_takes_the_middle_two_together():
    interval = ratio_interval(timed(1.0, 1.0, 3.0, 3.0), timed(1.0, 1.0, 1.0, 1.0))
    assert interval.low == pytest.approx(1 / 3)
    assert interval.high == pytest.approx(1.0)


def test_interval_is_the_same_each_time_and_missing_where_rounds_are_few_or_empty():
    rounds, empty = timed(1.0, 1.1, 1.2, 1.3, 1.4), timed(1.0, 1.0, 1.0, num_tokens=0.0)
    assert ratio_interval(rounds, timed(1.0, 1.1, 1.3)) == ratio_interval(rounds, timed(1.0, 1.1, 1.3))
    for few in (timed(1.0, 1.1), timed(1.0), empty):
        assert ratio_interval(rounds, few) is ratio_interval(few, rounds) is None
    assert NUM_RESAMPLES >= 10_000
