"""Ratios are between runs of the same work, their intervals by the stated rule; labels tell runs apart."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from cbexp.metrics import spread_of_rate
from cbexp.report import ReportError, load_runs, run_rows
from cbexp.report.baseline import ratio_between
from cbexp.report.bootstrap import NUM_RESAMPLES, ratio_interval
from cbexp.report.labels import label_runs, short_labels
from cbexp.report.page import build_page
from cbexp.report.run import TimedRound
from cbexp.report.works import find_works

OTHER_WORK = "b" * 64


def timed(*walls_s, num_tokens=100):
    return [TimedRound(wall_s, num_tokens, {}) for wall_s in walls_s]


def labels_of(*folders):
    runs = load_runs(folders)
    return [label_runs(runs)[run.folder] for run in runs]


def test_ratio_is_refused_across_different_work(make_run):
    one, other = load_runs([make_run("one"), make_run("other", workload_hash=OTHER_WORK)])
    with pytest.raises(ReportError, match="different work"):
        ratio_between(one, other)


def test_ratio_is_refused_where_the_work_is_not_known(make_run):
    one, other = load_runs([make_run("one", workload_hash=None), make_run("other", workload_hash=None)])
    with pytest.raises(ReportError, match="missing"):
        ratio_between(one, other)


def test_rows_have_ratios_within_each_work_alone(make_run):
    folders = [
        make_run("slow", ["compile=eager"], walls_s=(2.0, 2.0, 2.0)),
        make_run("fast", ["compile=default"], walls_s=(1.0, 1.0, 1.0)),
        make_run("other", ["seed=2"], walls_s=(0.1, 0.1, 0.1), workload_hash=OTHER_WORK),
    ]
    rows = {row["label"]: row for row in run_rows(load_runs(folders), "compile=eager")}
    assert rows["compile=default"]["ratio"] == pytest.approx(2.0)
    assert rows["compile=eager"]["ratio"] == 1.0
    assert rows["seed=2"]["ratio"] is None
    assert rows["compile=default"]["baseline"] == "compile=eager"


def test_the_slowest_of_a_work_is_the_baseline_when_none_is_named_and_a_lone_run_is_none(make_run):
    folders = [
        make_run(name, [f"seed={name}"], walls_s=(wall,) * 3) for name, wall in (("1", 1.0), ("2", 3.0))
    ]
    folders.append(make_run("3", ["seed=3"], workload_hash=OTHER_WORK))
    baselines = [row["label"] for row in run_rows(load_runs(folders)) if row["is_baseline"]]
    assert baselines == ["seed=2"]


def test_baseline_is_named_by_some_words_of_its_command(make_run):
    words = [
        ("driver=sync", "compile=eager"),
        ("driver=sync", "compile=default"),
        ("driver=generate", "compile=eager"),
    ]
    runs = load_runs([make_run(str(index), overrides) for index, overrides in enumerate(words)])
    named = [row["label"] for row in run_rows(runs, "driver=generate") if row["is_baseline"]]
    assert named == ["driver=generate compile=eager"]
    with pytest.raises(ReportError, match="fits several runs of the same work"):
        run_rows(runs, "compile=eager")
    with pytest.raises(ReportError, match=r"fits no completed run.*driver=sync compile=default"):
        run_rows(runs, "compile=nonsense")


def test_a_failed_run_cannot_be_the_baseline(make_run):
    runs = load_runs([make_run("1", ["seed=1"], status="failed"), make_run("2", ["seed=2"])])
    with pytest.raises(ReportError, match="fits no completed run"):
        run_rows(runs, "seed=1")


def test_interval_of_three_rounds_spans_all_pairs_of_rounds():
    interval = ratio_interval(timed(1.0, 1.1, 1.2), timed(2.0, 2.2, 2.6))
    assert interval.low == pytest.approx(2.0 / 1.2)
    assert interval.high == pytest.approx(2.6 / 1.0)


def test_interval_agrees_with_all_resamples_counted_out():
    """Of 3 rounds a side there are 27 x 27 resamples: their exact percentiles, with the medians of `metrics`."""
    walls, base_walls = (1.0, 1.4, 1.5), (2.0, 2.1, 3.0)
    rates = [spread_of_rate([100] * 3, list(drawn)).median for drawn in itertools.product(walls, repeat=3)]
    base = [
        spread_of_rate([100] * 3, list(drawn)).median for drawn in itertools.product(base_walls, repeat=3)
    ]
    ratios = sorted(one / other for one in rates for other in base)
    interval = ratio_interval(timed(*walls), timed(*base_walls))
    assert interval.low == pytest.approx(ratios[round(0.025 * len(ratios))])
    assert interval.high == pytest.approx(ratios[round(0.975 * len(ratios)) - 1])


def test_interval_of_even_numbers_of_rounds_takes_the_middle_two_together():
    interval = ratio_interval(timed(1.0, 1.0, 3.0, 3.0), timed(1.0, 1.0, 1.0, 1.0))
    assert interval.low == pytest.approx(1 / 3)
    assert interval.high == pytest.approx(1.0)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """Rounds of equal runs: of 95 % intervals few may miss 1; those of five rounds are known to be somewhat short."""
    import numpy as np

    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        walls = 1 + 0.02 * generator.standard_normal((2, 5))
        interval = ratio_interval(timed(*walls[0]), timed(*walls[1]))
        hits += interval.low <= 1 <= interval.high
    assert 0.9 <= hits / 200 <= 1.0


def test_interval_is_the_same_each_time_and_missing_with_two_rounds():
    rounds = timed(1.0, 1.1, 1.2, 1.3, 1.4)
    assert ratio_interval(rounds, timed(1.0, 1.1, 1.3)) == ratio_interval(rounds, timed(1.0, 1.1, 1.3))
    assert ratio_interval(rounds, timed(1.0, 1.1)) is None
    assert ratio_interval(timed(1.0), rounds) is None
    assert NUM_RESAMPLES >= 10_000


def test_labels_are_what_differs(make_run):
    one = make_run("1", ["model=tiny", "compile=eager", "tracking=disabled"])
    two = make_run("2", ["model=tiny", "compile=default", "tracking=offline"])
    three = make_run("3", ["model=tiny"])
    assert labels_of(one, two, three) == ["compile=eager", "compile=default", "defaults"]


def test_label_of_a_single_run_is_its_name(make_run):
    assert labels_of(make_run("1", ["model=tiny"])) == ["night"]


def test_runs_with_the_same_words_are_told_apart_by_their_folders(make_run):
    labels = labels_of(make_run("a/1", ["seed=1"]), make_run("b/1", ["seed=1"]), make_run("b/2", ["seed=2"]))
    assert labels == ["seed=1 (a/1)", "seed=1 (b/1)", "seed=2"]


def test_short_labels_leave_out_groups_where_that_stays_clear():
    labels = ["cache.page_size=16 model.dtype=a", "cache.dtype=b compile=eager"]
    assert list(short_labels(labels).values()) == [
        "page_size=16 model.dtype=a",
        "cache.dtype=b compile=eager",
    ]


def test_labels_of_thousands_of_runs_are_found_at_once(make_run):
    """Comparing each run with each other would take minutes."""
    run = load_runs([make_run("1", ["model=tiny"])])[0]
    folders = [run.folder / str(index % 2500) / str(index) for index in range(5000)]
    runs = [
        replace(run, folder=folder, overrides=("model=tiny", f"seed={index % 2500}"))
        for index, folder in enumerate(folders)
    ]
    started_s = time.process_time()
    labels = label_runs(runs)
    assert time.process_time() - started_s < 5
    assert len(set(labels.values())) == 5000
    assert labels[folders[7]] == "seed=7 (7)"


def test_round_without_output_leaves_no_interval():
    rounds, empty = timed(1.0, 1.1, 1.2), [TimedRound(1.0, 0.0, {}) for _ in range(3)]
    assert ratio_interval(rounds, empty) is None
    assert ratio_interval(empty, rounds) is None


def test_run_without_output_is_no_baseline_and_wins_nothing(make_run):
    silent = {"output_tokens_per_s": {"median": 0.0, "min": 0.0, "max": 0.0}}
    runs = load_runs([make_run("1", ["seed=1"]), make_run("2", ["seed=2"], **silent)])
    rows = run_rows(runs)
    assert [row["ratio"] for row in rows] == [None, None]
    assert [len(work.rows) for work in find_works(rows, runs)] == [1]
    assert "The only" in build_page(runs)
