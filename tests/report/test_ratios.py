"""Ratios are between runs of the same workload, their intervals by the stated rule; who leads by them."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from cbexp.metrics import spread_of_rate
from cbexp.report import ReportError, format_report, load_runs, run_rows
from cbexp.report.bootstrap import ratio_interval
from cbexp.report.lead import are_same_in_effect
from cbexp.report.page import build_page
from cbexp.report.run import TimedRound
from tests.report.conftest import OTHER_WORKLOAD, words_of

SILENT = {"output_tokens_per_s": {"median": 0.0, "min": 0.0, "max": 0.0}}


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


def timed(*walls_s):
    return [TimedRound(wall_s, 100, {}) for wall_s in walls_s]


def test_interval_agrees_with_all_resamples_counted_out():
    """Of 5 rounds a side there are 3,125 x 3,125 resamples: their percentiles, with the medians of `metrics`."""
    walls, base_walls = (1.0, 1.2, 1.4, 1.5, 1.7), (2.0, 2.1, 2.4, 3.0, 3.3)

    def rates_of(walls):
        drawn = itertools.product(walls, repeat=5)
        return Counter(spread_of_rate([100] * 5, list(some)).median for some in drawn).items()

    counts = Counter()
    for (rate, count), (base_rate, base_count) in itertools.product(rates_of(walls), rates_of(base_walls)):
        counts[rate / base_rate] += count * base_count
    ratios = sorted(counts)
    shares = np.cumsum([counts[ratio] for ratio in ratios]) / 5**10
    interval = ratio_interval(timed(*walls), timed(*base_walls))
    low, high = (ratios[np.searchsorted(shares, share)] for share in (0.025, 0.975))
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert ratio_interval(timed(*walls), timed(*base_walls)) == interval
    # Of an even number of rounds the middle two count together.
    even = ratio_interval(timed(1.0, 1.0, 1.0, 1.0, 1.0, 3.0), timed(*[1.0] * 6))
    assert (even.low, even.high) == pytest.approx((2 / 4, 1.0))


# Leads: runs whose settings differ without effect are one configuration, and no rivals of each other

IDLE = "cache.num_tokens={} has no effect with driver=generate, which has no paged cache."


@pytest.fixture
def make_cell(make_run):
    """A cell whose config.yaml says its driver and its cache, idle without the synchronous driver."""

    def make(driver, cache, wall_s, is_old=False, **more):
        idle = {"settings_without_effect": []}
        if driver == "generate" and cache:
            item = {"setting": "cache.num_tokens", "value": cache}
            idle["settings_without_effect"] = [item | {"reason": "driver=generate, which has no paged cache"}]
            idle = {"warnings": [IDLE.format(cache)]} if is_old else idle
        overrides = [f"driver={driver}", *([f"cache.num_tokens={cache}"] if cache else [])]
        walls_s = tuple(wall_s * (1 + index / 100) for index in range(5))
        folder = make_run(f"{driver}_{cache}", overrides, walls_s, **idle, **more)
        settings = f"cache: {{name: a{cache}, num_tokens: {cache or 'null'}}}\ndriver: {{name: {driver}}}\n"
        settings += f"tracking: {{group: {wall_s}}}\n"
        (folder / "config.yaml").write_text(settings)
        return folder

    return make


def card_and_text(*folders):
    """The winner's card of the page, and the printed report."""
    runs = load_runs(folders)
    page = build_page(runs)
    card = page[page.index('<div class="card winner">') : page.index('<dl class="figures">')]
    return words_of(card), format_report(runs)


def test_cells_that_differ_without_effect_are_one_configuration(make_cell):
    folders = [make_cell("generate", cache, wall_s) for cache, wall_s in ((1, 1.0), (2, 1.1), (None, 1.2))]
    card, text = card_and_text(*folders, make_cell("sync", 1, 2.0), make_cell("sync", 2, 3.0))
    assert card.startswith("Fastest of 5 runs")
    same = "The same configuration in effect as #2-3: what differs between them is noise."
    assert f"{same} {IDLE.format(1)}" in card
    assert "Ahead of #4 (the fastest other one) beyond the noise: 2.00x" in card
    assert "#1 is ahead of #4 beyond the noise: 2.00x (" in text and "; #2-3: the same in effect" in text


def test_lead_over_rivals(make_cell):
    idle, sync = make_cell("generate", 1, 1.0), make_cell("sync", 1, 2.0)
    card, _ = card_and_text(idle, sync)
    assert "Fastest of 2 configurations" in card and IDLE.format(1) in card
    card, text = card_and_text(idle, make_cell("generate", 2, 3.0))
    assert "There is no other configuration to compare it with" in card
    assert "#1 has no other configuration beside it" in text
    card, text = card_and_text(sync, make_cell("sync", 2, 2.02))  # what differs has an effect
    assert "Not clearly ahead of the runner-up" in card and "more rounds would tell" in card
    assert "#1 is not clearly ahead of #2: 1.01x (" in text


def test_other_code_another_machine_or_unknown_settings_are_a_difference(make_cell):
    one = make_cell("generate", 1, 1.0)
    other_code, other_machine = {"source": {"commit": "c" * 40}}, {"cpu": {"num_threads": 7}}
    for environment in (other_code, other_machine):
        assert not are_same_in_effect(
            *load_runs([one, make_cell("generate", 2, 1.0, environment=environment)])
        )
    # Older records have a warning in place of a list of settings.
    one, other = (make_cell("generate", cache, 1.0, is_old=True) for cache in (1, 2))
    assert are_same_in_effect(*load_runs([one, other]))
    (other / "config.yaml").write_text("cache: [")
    assert not are_same_in_effect(*load_runs([one, other]))


@pytest.mark.parametrize(
    ("wall_s", "words"), [(1.004, "not clearly ahead of #2: 1.00x"), (1.006, "beyond the noise")]
)
def test_a_lead_that_is_written_as_none_is_none(make_run, wall_s, words):
    """However steady the rounds are."""
    walls = {"eager": (1.0,) * 5, "default": (wall_s,) * 5}
    folders = [make_run(mode, [f"compile={mode}"], walls[mode]) for mode in walls]
    assert words in card_and_text(*folders)[1]
