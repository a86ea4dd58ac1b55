"""Labels say what differs; reports over folders of several experiments have their workloads in a useful order."""

from __future__ import annotations

import pytest

from cbexp.report import format_table, load_runs, run_rows
from cbexp.report.labels import label_runs, short_labels
from cbexp.report.page import build_page
from cbexp.report.table import format_markdown
from tests.report.conftest import words_of, write_json

SHARED = ("model=qwen3_4b", "model.init=random", "experiment=rollout_32")


def labels_of(*folders):
    runs = load_runs(folders)
    return [label_runs(runs)[run.folder] for run in runs]


def test_labels_are_what_differs_and_folders_where_that_is_nothing(make_run):
    one = make_run("1", ["model=tiny", "compile=eager", "tracking=disabled"])
    two = make_run("2", ["model=tiny", "compile=default", "tracking=offline"])
    three = make_run("3", ["model=tiny"])
    assert labels_of(one, two, three) == ["compile=eager", "compile=default", "defaults"]
    assert labels_of(one) == ["night"]  # the name of a single run
    folders = make_run("a/1", ["seed=1"]), make_run("b/1", ["seed=1"]), make_run("b/2", ["seed=2"])
    assert labels_of(*folders) == ["seed=1 (a/1)", "seed=1 (b/1)", "seed=2"]


def test_short_labels_leave_out_groups_where_that_stays_clear():
    labels = short_labels(["cache.page_size=16 model.dtype=a", "cache.dtype=b compile=eager"])
    assert list(labels.values()) == ["page_size=16 model.dtype=a", "cache.dtype=b compile=eager"]


# Several workloads


@pytest.fixture
def checkout(make_run, tmp_path):
    """Two workloads of the reader's own, a lone run, and a faster workload that came with the checkout."""

    def make(folder, day, overrides, letter, **options):
        path = make_run(f"outputs/{folder}", overrides, workload_hash=letter * 64, **options)
        started_at = f"2026-11-{day}T00:00:00+00:00"
        write_json(path / "status.json", {"status": "completed", "started_at": started_at})

    for mode, wall_s in {"eager": 0.1, "default": 0.2, "cuda_graph": 0.3}.items():
        make(f"reference/card/{mode}", 30, [*SHARED, f"compile={mode}"], "r", walls_s=(wall_s,) * 3)
    for seed in (1, 2):
        walls_s = (float(seed),) * seed
        make(f"old/{seed}", 10, [f"seed={seed}", "num_rounds=5"], "o", walls_s=walls_s, num_generations=8)
        make(f"new/{seed}", 20, [f"seed={seed}", "num_rounds=3"], "n", walls_s=walls_s)
    make("lone", 15, ["dataset.num_prompts=8"], "l", name="lone", is_fixed_length=False)
    make_run("outputs/bad", ["compile=nonsense"], status="failed", message="no")
    return tmp_path / "outputs"


TABLE = """\
 #   workload   cell                    status      output tok/s   spread            ratio     memory   roofline   accuracy
 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
 1   A          seed=1                  completed            100        -            2.00x   1.50 GiB      50.0%          -
 2   A          seed=2                  completed             50    ±0.0%            1.00x   1.50 GiB      50.0%          -
 3   B          dataset.num_prompts=8   completed             83   ±17.1%   other workload   1.50 GiB      50.0%          -
 4   C          seed=1                  completed            100        -            2.00x   1.50 GiB      50.0%          -
 5   C          seed=2                  completed             50    ±0.0%            1.00x   1.50 GiB      50.0%          -
 6   D          compile=eager           completed          1,000    ±0.0%            3.00x   1.50 GiB      50.0%          -
 7   D          compile=default         completed            500    ±0.0%            1.50x   1.50 GiB      50.0%          -
 8   D          compile=cuda_graph      completed            333    ±0.0%            1.00x   1.50 GiB      50.0%          -
 9   -          compile=nonsense        failed                 -        -                -          -          -          -

#1 makes 2.00x what #2 does; too few rounds to tell how sure that is
#4 makes 2.00x what #5 does; too few rounds to tell how sure that is
#6 is ahead of #7 beyond the noise: 2.00x (2.00 to 2.00)
4 different workloads (prompts, limits, sampling): a ratio is to the slowest run of the same workload, #2, #5, #8
workload A: tiny, synthetic, 4 prompts, exactly 25 new tokens: num_rounds=3
workload B: tiny, synthetic, 4 prompts, up to 25 new tokens
workload C: tiny, synthetic, 4 prompts, 8 completions each, exactly 25 new tokens: num_rounds=5
workload D: tiny, synthetic, 4 prompts, exactly 25 new tokens: model=qwen3_4b model.init=random experiment=rollout_32
3 of 9 runs are from outputs/reference, which came with the checkout
"""  # noqa: E501
CARDS = """\
Workload A tiny, synthetic, 4 prompts, exactly 25 new tokens; all with num_rounds=3 \
Fastest of 2 configurations seed=1 100 output tokens/s one round, so that no spread is known \
? 2.00x the runner-up; too few rounds to tell how sure that is. \
to baseline2.00x peak memory1.50 GiB of memory roofline50.0%same output as baseline100.0%"""


def test_own_workloads_come_newest_first_and_the_references_last(checkout, make_run):
    runs = load_runs([checkout])
    assert format_table(runs).splitlines() == TABLE.splitlines()
    page = build_page(runs)
    assert words_of(page[page.index("<main>") :]).startswith(CARDS)
    assert page.count('<span class="none">other workload</span>') == 1
    sentence = TABLE.splitlines()[-1]
    assert sentence in page and sentence.replace("_", r"\_") in format_markdown(runs)
    reference_alone = format_table(load_runs([checkout / "reference"]))
    assert "are from" not in reference_alone and " workload " not in reference_alone
    again = make_run("outputs/again", [*SHARED, "compile=eager"], workload_hash="r" * 64)
    write_json(again / "status.json", {"status": "completed", "started_at": "2026-11-25T00:00:00+00:00"})
    assert run_rows(load_runs([checkout]))[0]["workload_hash"][0] == "r", "it has a run of the reader's own"


def test_page_of_several_experiments_is_named_by_them_and_has_no_ratio_where_no_run_compares(make_run):
    folders = [make_run(name, [f"seed={name}"], name=name, workload_hash=name * 64) for name in "abcd"]
    assert "no ratio stands between them" in format_table(load_runs(folders))
    for num_names, title in ((3, "a + b + c"), (4, "4 experiments")):
        assert f"<h1>{title}</h1>" in build_page(load_runs(folders[:num_names]))
