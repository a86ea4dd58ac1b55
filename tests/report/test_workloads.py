"""Labels say what differs; reports over folders of several experiments have their workloads in a useful order."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cbexp.report import format_table, load_runs, run_rows
from cbexp.report.labels import label_runs, short_labels
from cbexp.report.page import build_page
from cbexp.report.page_charts import throughput_charts
from cbexp.report.rows import format_row_numbers
from cbexp.report.table import format_markdown
from cbexp.report.workloads import find_workloads
from tests.report.report_fixtures import load_one, write_json

SHARED = ("model=qwen3_4b", "model.init=random", "experiment=rollout_32")


def labels_of(*folders):
    runs = load_runs(folders)
    return [label_runs(runs)[run.folder] for run in runs]


def test_labels_are_what_differs(make_run):
    one = make_run("1", ["model=tiny", "compile=eager", "tracking=disabled"])
    two = make_run("2", ["model=tiny", "compile=default", "tracking=offline"])
    three = make_run("3", ["model=tiny"])
    assert labels_of(one, two, three) == ["compile=eager", "compile=default", "defaults"]
    assert labels_of(one) == ["night"]  # the name of a single run


def test_runs_with_the_same_words_are_told_apart_by_their_folders(make_run):
    labels = labels_of(make_run("a/1", ["seed=1"]), make_run("b/1", ["seed=1"]), make_run("b/2", ["seed=2"]))
    assert labels == ["seed=1 (a/1)", "seed=1 (b/1)", "seed=2"]


def test_labels_of_thousands_of_runs_are_all_different(make_run):
    """Comparing each run with each other would take minutes."""
    run = load_one(make_run("1"))
    folders = [run.folder / str(index % 2500) / str(index) for index in range(5000)]
    overrides = [("model=tiny", f"seed={index % 2500}") for index in range(5000)]
    runs = [
        replace(run, folder=folder, overrides=own) for folder, own in zip(folders, overrides, strict=True)
    ]
    labels = label_runs(runs)
    assert len(set(labels.values())) == 5000
    assert labels[folders[7]] == "seed=7 (7)"


def test_short_labels_leave_out_groups_where_that_stays_clear():
    labels = short_labels(["cache.page_size=16 model.dtype=a", "cache.dtype=b compile=eager"])
    assert list(labels.values()) == ["page_size=16 model.dtype=a", "cache.dtype=b compile=eager"]


def test_numbers_of_rows_are_written_as_ranges():
    assert format_row_numbers([3, 1, 2, 7]) == "#1-3, #7"


# Several workloads


@pytest.fixture
def checkout(make_run, tmp_path):
    """Two workloads of the reader's own, a lone run, and a faster workload that came with the checkout."""

    def make(folder, day, overrides, letter, **options):
        path = make_run(f"outputs/{folder}", overrides, workload_hash=letter * 64, **options)
        started_at = f"2026-11-{day}T00:00:00+00:00"
        write_json(path / "status.json", {"status": "completed", "started_at": started_at})

    for index, mode in enumerate(("eager", "default", "cuda_graph")):
        walls_s = (0.1 + index / 10,) * 3
        make(f"reference/card/{mode}", 30, [*SHARED, f"compile={mode}"], "r", walls_s=walls_s)
    for seed in (1, 2):
        make(f"old/{seed}", 10, [f"seed={seed}", "num_rounds=5"], "o")
        make(f"new/{seed}", 20, [f"seed={seed}", "num_rounds=3"], "n")
    make("lone", 15, ["dataset.num_prompts=8"], "l", name="lone")
    make_run("outputs/bad", ["compile=nonsense"], status="failed", message="no")
    return tmp_path / "outputs"


def test_own_workloads_come_newest_first_and_the_references_last(checkout, make_run):
    runs = load_runs([checkout])
    rows = run_rows(runs)
    hashes = [row["workload_hash"][0] for row in rows if row["workload_hash"]]
    assert "".join(hashes) == "nnloorrr"
    assert rows[-1]["status"] == "failed"
    rates = [row["output_tokens_per_s"] for row in rows[5:8]]
    assert rates == sorted(rates, reverse=True)
    workloads = find_workloads(rows, runs)
    assert [workload.letter for workload in workloads] == ["A", "B", "C", "D"]
    assert [workload.lead is None for workload in workloads] == [
        False,
        True,
        False,
        False,
    ]  # a lone run has won nothing
    again = make_run("outputs/again", [*SHARED, "compile=eager"], workload_hash="r" * 64)
    write_json(again / "status.json", {"status": "completed", "started_at": "2026-11-25T00:00:00+00:00"})
    assert run_rows(load_runs([checkout]))[0]["workload_hash"][0] == "r", (
        "now it has a run of the reader's own"
    )


def test_references_are_counted_where_not_all_are(checkout):
    sentence = "3 of 9 runs are from outputs/reference"
    runs = load_runs([checkout])
    assert all(sentence in form(runs) for form in (format_table, format_markdown, build_page))
    assert "are from" not in format_table(load_runs([checkout / "reference"]))


def test_labels_omit_what_a_workload_shares_and_a_line_has_it(checkout):
    runs = load_runs([checkout])
    rows = run_rows(runs)
    labels = {row["label_in_work"] for row in rows}
    assert {"compile=eager", "seed=1", "dataset.num_prompts=8", "compile=nonsense"} <= labels
    assert not any("rollout_32" in label for label in labels)
    table = format_table(runs)
    assert f"tiny, synthetic, 4 prompts, exactly 25 new tokens: {' '.join(SHARED)}" in table
    assert re.search(r"1 +A +seed=1", table)
    assert " workload " not in format_table(load_runs([checkout / "old"]))  # one needs no column
    workload = find_workloads(rows, runs)[-1]
    ticks = throughput_charts([workload], rows)[workload.letter].figure["layout"]["yaxis"]["ticktext"]
    assert "compile=eager" in ticks


def test_one_round_has_no_spread(make_run):
    runs = load_runs([make_run("1", ["seed=1"], walls_s=(1.0,)), make_run("2", ["seed=2"])])
    spreads = {row["label"]: row["relative_half_range"] for row in run_rows(runs)}
    assert (spreads["seed=1"], spreads["seed=2"] is None) == (None, False)
    page = build_page(runs)
    assert "±0.0%" not in page + format_table(runs)
    assert "one round, so that no spread is known" in page


@pytest.mark.parametrize(("num_names", "title"), [(3, "a + b + c"), (4, "4 experiments")])
def test_title_counts_many_experiments(make_run, num_names, title):
    folders = [make_run(name, [f"seed={name}"], name=name) for name in "abcd"[:num_names]]
    assert f"<h1>{title}</h1>" in build_page(load_runs(folders))
