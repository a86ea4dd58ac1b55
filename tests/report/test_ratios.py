"""Ratios are between runs of the same workload, their intervals by the stated rule."""

from __future__ import annotations

import itertools

import pytest

from cbexp.metrics import spread_of_rate
from cbexp.report import ReportError, load_runs, run_rows
from cbexp.report.baseline import ratio_between
from cbexp.report.bootstrap import ratio_interval
from cbexp.report.run import TimedRound
from tests.report.report_fixtures import OTHER_WORKLOAD, WORKLOAD

SILENT = {"output_tokens_per_s": {"median": 0.0, "min": 0.0, "max": 0.0}}


@pytest.mark.parametrize(
    ("hashes", "message"), [((WORKLOAD, OTHER_WORKLOAD), "different workloads"), ((None, None), "missing")]
)
def test_ratio_is_refused_unless_the_workloads_are_known_to_be_the_same(make_run, hashes, message):
    one, other = load_runs([make_run(str(index), workload_hash=value) for index, value in enumerate(hashes)])
    with pytest.raises(ReportError, match=message):
        ratio_between(one, other)


def test_ratios_are_to_the_baseline_of_each_workload(make_run):
    """Three runs of one workload, one of another, one without output, and one that failed."""
    make_run("1", ["driver=sync", "compile=eager"], (2.0,) * 3)
    make_run("2", ["driver=sync", "compile=default"], (1.0,) * 3)
    make_run("3", ["driver=generate", "compile=eager"], (1.6,) * 3)
    make_run("4", ["seed=2"], (0.1,) * 3, workload_hash=OTHER_WORKLOAD)
    make_run("5", ["seed=3"], **SILENT)
    runs = load_runs([make_run("6", ["seed=1"], status="failed").parent])
    for named, baseline, ratios in (
        (None, "driver=sync compile=eager", [1.0, 2.0, 1.25]),  # the slowest
        ("compile=default", "driver=sync compile=default", [0.5, 1.0, 0.625]),
        ("driver=generate", "driver=generate compile=eager", [0.8, 1.6, 1.0]),
    ):
        rows = {row["folder"][-1]: row for row in run_rows(runs, named)}
        assert [rows[name]["ratio"] for name in "123456"] == [*ratios, None, None, None]
        assert {row["label"] for row in rows.values() if row["is_baseline"]} == {baseline}
        assert {row["baseline"] for row in rows.values()} == {baseline, None}
    for named, message in (
        ("compile=eager", "fits several runs of one workload"),
        ("compile=nonsense", r"fits no completed run.*driver=sync compile=default"),
        ("seed=1", r"fits no completed run.*driver=sync compile=default"),
    ):
        with pytest.raises(ReportError, match=message):
            run_rows(runs, named)


# Intervals


def timed(*walls_s, num_tokens=100):
    return [TimedRound(wall_s, num_tokens, {}) for wall_s in walls_s]


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
    assert ratio_interval(timed(*walls), timed(*base_walls)) == interval
    # Of an even number of rounds the middle two count together.
    even = ratio_interval(timed(1.0, 1.0, 1.0, 1.0, 1.0, 3.0), timed(*[1.0] * 6))
    assert (even.low, even.high) == pytest.approx((2 / 4, 1.0))


def test_interval_is_missing_where_rounds_are_few_or_empty():
    rounds, empty = timed(1.0, 1.1, 1.2, 1.3, 1.4), timed(1.0, 1.0, 1.0, num_tokens=0.0)
    for few in (timed(1.0, 1.1), empty):
        assert ratio_interval(rounds, few) is ratio_interval(few, rounds) is None
