"""Reports over folders of several experiments: works in a useful order, labels that say what differs within each."""

from __future__ import annotations

import json
import re

import pytest

from cbexp.report import format_table, load_runs, run_rows
from cbexp.report.page import build_page
from cbexp.report.page_charts import throughput_charts
from cbexp.report.table import format_markdown
from cbexp.report.works import find_works

SHARED = ("model=qwen3_4b", "model.init=random", "experiment=rollout_32")


def start(folder, day):
    path = folder / "status.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"started_at": f"2026-11-{day}T00:00:00+00:00"})
    )
    return folder


@pytest.fixture
def checkout(make_run, tmp_path):
    """Two works of the reader's own, a lone run, and a faster work that came with the checkout."""
    for index, mode in enumerate(("eager", "default", "cuda_graph")):
        overrides = [*SHARED, f"compile={mode}"]
        walls_s = (0.1 + index / 10,) * 3
        folder = f"outputs/reference/card/{mode}"
        start(make_run(folder, overrides, walls_s, workload_hash="r" * 64, name="rollout_32"), 30)
    for seed in (1, 2):
        start(make_run(f"outputs/old/{seed}", [f"seed={seed}", "num_rounds=5"], workload_hash="o" * 64), 10)
        start(make_run(f"outputs/new/{seed}", [f"seed={seed}", "num_rounds=3"], workload_hash="n" * 64), 20)
    start(make_run("outputs/lone", ["dataset.num_prompts=8"], workload_hash="l" * 64, name="lone"), 15)
    make_run("outputs/bad", ["compile=nonsense"], status="failed", message="no")
    return tmp_path / "outputs"


def test_own_works_come_newest_first_and_the_references_last(checkout):
    runs = load_runs([checkout])
    rows = run_rows(runs)
    assert [work.rows[0]["workload_hash"][0] for work in find_works(rows, runs)] == ["n", "l", "o", "r"]
    assert rows[-1]["status"] == "failed"
    rates = [row["output_tokens_per_s"] for row in rows if row["workload_hash"] == "r" * 64]
    assert rates == sorted(rates, reverse=True)


def test_a_work_with_a_run_of_the_readers_own_is_theirs(checkout, make_run):
    start(make_run("outputs/again", [*SHARED, "compile=eager"], workload_hash="r" * 64), 25)
    assert run_rows(load_runs([checkout]))[0]["workload_hash"][0] == "r"


def test_references_are_counted_where_not_all_are(checkout):
    told = "3 of 9 runs are from outputs/reference"
    runs = load_runs([checkout])
    assert told in format_table(runs)
    assert told in format_markdown(runs)
    assert told in build_page(runs)
    assert "are from" not in format_table(load_runs([checkout / "reference"]))


def test_labels_omit_what_a_work_shares_and_a_line_has_it(checkout):
    runs = load_runs([checkout])
    rows = run_rows(runs)
    labels = {row["label_in_work"] for row in rows}
    assert {"compile=eager", "seed=1", "dataset.num_prompts=8", "compile=nonsense"} <= labels
    assert not any("rollout_32" in label for label in labels)
    table = format_table(runs)
    assert f"exactly 25 new tokens: {' '.join(SHARED)}" in table
    assert re.search(r"1 +A +seed=1", table)
    work = find_works(rows, runs)[-1]
    ticks = throughput_charts([work], rows)[work.letter].figure["layout"]["yaxis"]["ticktext"]
    assert "compile=eager" in ticks


def test_one_work_needs_no_column_for_it(make_run):
    assert " work " not in format_table(load_runs([make_run("1", ["seed=1"]), make_run("2", ["seed=2"])]))


def test_runs_of_different_work_say_why_they_have_no_ratio(make_run):
    folders = [make_run(name, [f"seed={name}"], workload_hash=name * 64) for name in "12"]
    runs = load_runs(folders)
    table = format_table(runs)
    assert table.count("other work") == 2
    assert "no ratio stands between them" in table
    assert build_page(runs).count('<span class="none">other work</span>') == 2
    assert "other work" not in format_table(runs[:1])


def test_one_round_has_no_spread(make_run):
    runs = load_runs([make_run("1", ["seed=1"], walls_s=(1.0,)), make_run("2", ["seed=2"])])
    assert {row["label"]: row["relative_half_range"] is None for row in run_rows(runs)} == {
        "seed=1": True,
        "seed=2": False,
    }
    page = build_page(runs)
    assert "±0.0%" not in page + format_table(runs)
    assert "one round, so that no spread is known" in page


@pytest.mark.parametrize(("num_names", "title"), [(3, "a + b + c"), (4, "4 experiments")])
def test_title_counts_many_experiments(make_run, num_names, title):
    folders = [make_run(name, [f"seed={name}"], name=name) for name in "abcd"[:num_names]]
    assert f"<h1>{title}</h1>" in build_page(load_runs(folders))
