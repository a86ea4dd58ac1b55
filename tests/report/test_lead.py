"""Who won: runs whose settings differ without effect are one configuration, and no rivals of each other."""

from __future__ import annotations

import json
import re

import pytest

from cbexp.report import format_report, load_runs, run_rows
from cbexp.report.lead import are_same_in_effect
from cbexp.report.page import build_page
from cbexp.report.page_table import TIMES
from cbexp.report.workloads import find_workloads

REASON = "driver=generate, which has no paged cache"
IDLE = f"cache.num_tokens={{}} has no effect with {REASON}."
SLOWER_TOO = "but the same configuration also came out slower than it"


@pytest.fixture
def make_cell(make_run):
    """A cell whose config.yaml says its driver and its cache, idle without the synchronous driver.

    Old records say so in a warning's words alone.
    """

    def make(driver, cache, wall_s, num_rounds=5, is_old=False, **more):
        is_idle = driver == "generate" and cache
        warnings = [IDLE.format(cache)] if is_idle else []
        if not is_old:
            idle = {"setting": "cache.num_tokens", "value": cache, "reason": REASON}
            more["settings_without_effect"] = [idle] if is_idle else []
        overrides = [f"driver={driver}", *([f"cache.num_tokens={cache}"] if cache else [])]
        walls_s = tuple(wall_s * (1 + index / 100) for index in range(num_rounds))
        folder = make_run(f"{driver}_{cache}", overrides, walls_s, warnings=warnings, **more)
        settings = f"cache: {{name: a{cache}, num_tokens: {cache or 'null'}}}\ndriver: {{name: {driver}}}\n"
        (folder / "config.yaml").write_text(
            f"{settings}num_rounds: {num_rounds}\ntracking: {{group: {wall_s}}}\n"
        )
        return folder

    return make


def lead_of(*folders):
    runs = load_runs(folders)
    (workload,) = find_workloads(run_rows(runs), runs)
    return workload.lead


def card_of(*folders):
    page = build_page(load_runs(folders))
    card = page[page.index('<div class="card winner">') : page.index('<dl class="figures">')]
    return " ".join(re.sub(r"<[^>]+>", "", card).replace(TIMES, "x").split())


def text_of(*folders):
    return format_report(load_runs(folders))


def test_cells_that_differ_without_effect_are_one_configuration(make_cell):
    folders = [make_cell("generate", cache, wall_s) for cache, wall_s in ((1, 1.0), (2, 1.1), (None, 1.2))]
    folders += [make_cell("sync", 1, 2.0), make_cell("sync", 2, 3.0)]
    lead = lead_of(*folders)
    assert [row["label"] for row in lead.same] == ["driver=generate cache.num_tokens=2", "driver=generate"]
    assert lead.rival["label"] == "driver=sync cache.num_tokens=1"
    assert lead.ratio.value == pytest.approx(2.0)
    card = card_of(*folders)
    assert "Fastest of 5 runs" in card
    same = "The same configuration in effect as #2-3: what differs between them is noise."
    assert f"{same} {IDLE.format(1)}" in card
    assert "Ahead of #4 (the fastest other one) beyond the noise: 2.00x" in card
    assert "more rounds" not in card
    assert "; #2-3: the same in effect" in text_of(*folders)


def test_settings_that_have_an_effect_make_rivals(make_cell):
    folders = [make_cell("sync", 1, 1.0), make_cell("sync", 2, 1.01)]
    assert not are_same_in_effect(*load_runs(folders))
    card = card_of(*folders)
    assert "Not clearly ahead of the runner-up" in card and "more rounds would tell" in card
    assert "#1 is not clearly ahead of #2: 1.01x (" in text_of(*folders)


@pytest.mark.parametrize("is_old", [False, True])
def test_what_has_no_effect_is_read_from_data_and_from_the_words_of_old_records(make_cell, is_old):
    one, other = (make_cell("generate", cache, 1.0, is_old=is_old) for cache in (1, 2))
    assert are_same_in_effect(*load_runs([one, other]))
    words = "cache.num_tokens=1 has no effect with something that no record says."
    summary = json.loads((one / "summary.json").read_text()) | {"settings_without_effect": []}
    (one / "summary.json").write_text(json.dumps(summary | {"warnings": [words]}))
    (other / "summary.json").write_text(json.dumps(summary | {"warnings": [words]}))
    assert not are_same_in_effect(*load_runs([one, other]))


def test_an_idle_setting_of_a_winner_alone_is_in_its_card(make_cell):
    card = card_of(make_cell("generate", 1, 1.0), make_cell("sync", 1, 2.0))
    assert IDLE.format(1) in card
    assert "Fastest of 2 configurations" in card


def test_being_ahead_is_luck_where_the_same_configuration_also_lost(make_cell):
    folders = [make_cell("generate", 1, 1.0), make_cell("sync", 1, 2.0), make_cell("generate", 2, 3.0)]
    assert lead_of(*folders).verdict == "shared"
    assert f"2.00x, {SLOWER_TOO}" in card_of(*folders)
    assert f"#1 makes 2.00x what #2 does, {SLOWER_TOO}; #3" in text_of(*folders)


def test_without_rivals_or_rounds_nothing_is_claimed(make_cell):
    card = card_of(make_cell("generate", 1, 1.0), make_cell("generate", 2, 3.0, num_rounds=1))
    assert "There is no other configuration to compare it with" in card
    text = text_of(make_cell("sync", 3, 1.0, num_rounds=1), make_cell("sync", 4, 2.0))
    assert "#1 makes 2.04x what #2 does; too few rounds to tell" in text


@pytest.mark.parametrize(
    "environment",
    [{"versions": {"torch": "9"}}, {"source": {"commit": "c" * 40}}, {"cpu": {"num_threads": 7}}],
)
def test_other_code_or_another_machine_is_a_difference(make_cell, environment):
    one, other = make_cell("generate", 1, 1.0), make_cell("generate", 2, 1.0, environment=environment)
    assert not are_same_in_effect(*load_runs([one, other]))


@pytest.mark.parametrize("content", [None, "", "[1]", "a: [", "\0", "cache: 3\n"])
def test_damaged_settings_are_taken_for_different(make_cell, content):
    one, other = make_cell("generate", 1, 1.0), make_cell("generate", 2, 1.0)
    assert are_same_in_effect(*load_runs([one, other]))
    if content is None:
        (other / "config.yaml").unlink()
    else:
        (other / "config.yaml").write_text(content)
    assert not are_same_in_effect(*load_runs([one, other]))


@pytest.mark.parametrize(("num_correct", "is_worse"), [(60, True), (2840, False)])
def test_a_winner_that_is_wrong_more_often_is_named(make_run, num_correct, is_worse):
    """Of 3,000 answers in five rounds; 2,850 of the other run's are right."""
    right = {"num_judged": 3000, "num_correct": 2850, "accuracy": 0.95}
    wrong = {"num_judged": 3000, "num_correct": num_correct, "accuracy": num_correct / 3000}
    slow = make_run("slow", ["compile=eager"], **right)
    fast = make_run("fast", ["compile=default"], [0.5, 0.51, 0.52, 0.53, 0.54], **wrong)
    card, text = card_of(slow, fast), text_of(slow, fast)
    assert "#1 is ahead of #2 beyond the noise: " in text and "Ahead of the runner-up" in card
    sentence = "answers are wrong more often than those of #2, beyond chance"
    assert (f"Its {sentence}: 95.0% of those" in card) == is_worse
    assert (f"; its {sentence}" in text) == is_worse
    assert ("note: fewer correct completions than another run of the same workload" in text) == is_worse


@pytest.mark.parametrize(
    ("wall_s", "words"), [(1.004, "not clearly ahead of #2: 1.00x"), (1.006, "beyond the noise")]
)
def test_a_lead_that_is_written_as_none_is_none(make_run, wall_s, words):
    """However steady the rounds are."""
    walls = {"eager": (1.0,) * 5, "default": (wall_s,) * 5}
    assert words in text_of(*(make_run(mode, [f"compile={mode}"], walls[mode]) for mode in walls))
