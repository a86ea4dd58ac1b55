"""Two reports: regressions beyond the noise are found, noise is not one, and CI sees it by the exit status."""

from __future__ import annotations

import re

import pytest

from cbexp.cell_settings import SETTINGS_OUTSIDE_A_CELL
from cbexp.report.command_line import main
from tests.report.conftest import OTHER_WORKLOAD

STEADY = {"walls_s": (1.0, 1.01, 1.02, 1.03, 1.04)}
SLOWER = {"walls_s": (1.1, 1.111, 1.122, 1.133, 1.144)}
NOISY, NOISY_TOO = {"walls_s": (0.8, 1.0, 1.1, 1.2, 1.5)}, {"walls_s": (0.85, 1.05, 1.15, 1.25, 1.55)}
FLAT, FLAT_AND_SLOWER = {"walls_s": (1.0,) * 3}, {"walls_s": (1.05,) * 3}
TOO_FEW = {"walls_s": (9.0, 9.0)}
FAILED = {"status": "failed", "message": "why it did"}
JUDGED = {"num_judged": 500, "num_rounds": 5}
RIGHT, WRONG, HARDLY_WRONG = (JUDGED | {"accuracy": accuracy} for accuracy in (0.9, 0.5, 0.88))
OK, REGRESSION, IMPOSSIBLE, UNCLEAR = 0, 1, 2, 3


@pytest.fixture
def compare(make_run, tmp_path, capsys):
    """Compares cells (arguments of `make_run` by override); returns exit status and what was printed."""

    def run(old, new, *options):
        for side, cells in (("old", old), ("new", new)):
            (tmp_path / side).mkdir(exist_ok=True)
            for index, (override, arguments) in enumerate(cells.items()):
                make_run(f"{side}/{index}", [override], **arguments)
        status = main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_every_verdict_in_one_table(compare):
    old = {"a": STEADY, "b": STEADY, "c": SLOWER, "d": {}, "e": {}, "f": FAILED, "g": RIGHT, "h": TOO_FEW}
    new = {"a": STEADY, "b": SLOWER, "c": STEADY, "d": FAILED, "f": FAILED, "g": WRONG, "h": TOO_FEW}
    status, output = compare(old, new | {"i": {"environment": {"versions": {"torch": "9.9"}}}})
    assert status == REGRESSION
    table, rest = output.split("\n\n", 1)
    assert [re.split(" {3,}", line.strip()) for line in table.splitlines()[2:]] == [
        ["b", "slower", "98", "89", "0.909", "0.883 to 0.936", "-"],
        ["d", "failed", "83", "-", "-", "-", "-", "failed: why it did"],
        ["e", "missing", "83", "-", "-", "-", "-", "completed in OLD, not in NEW"],
        ["g", "less accurate", "83", "83", "1.000", "0.786 to 1.273", "90.0% > 50.0%",
         "correct completions fell from 90.0% to 50.0%"],
        ["h", "unclear", "11", "11", "1.000", "-", "-", "fewer than 3 timed rounds; set num_rounds=5 or more"],
        ["c", "faster", "89", "98", "1.100", "1.068 to 1.133", "-"],
        ["a", "no clear change", "98", "98", "1.000", "0.971 to 1.030", "-"],
        ["i", "new", "-", "83", "-", "-", "-", "not in OLD"],
        ["f", "ignored", "-", "-", "-", "-", "-", "failed in OLD, so that there is nothing to compare with"],
    ]  # fmt: skip
    assert "differs: torch: 2.11.0 (OLD and NEW), 9.9 (NEW)" in rest
    assert "lies below 0.98" in " ".join(rest.split())
    assert "REGRESSION: 1 slower, 1 failed, 1 missing, 1 less accurate, 1 unclear" in rest


@pytest.mark.parametrize(
    ("old", "new", "options", "status", "words"),
    [
        (NOISY, NOISY_TOO, [], OK, "1 no clear change"),
        (FLAT, FLAT_AND_SLOWER, [], REGRESSION, "1 slower"),
        (FLAT, FLAT_AND_SLOWER, ["--threshold", "0.1"], OK, "1 no clear change"),
        (RIGHT, HARDLY_WRONG, [], OK, "1 no clear change"),
        ({}, {"workload_hash": OTHER_WORKLOAD}, [], UNCLEAR, "different workloads"),
        (FAILED, FAILED, [], UNCLEAR, "1 ignored"),
        ({}, {}, ["--threshold", "2"], IMPOSSIBLE, "outside [0, 1)"),
    ],
)
def test_two_single_runs_compare_whatever_they_set(compare, old, new, options, status, words):
    found, output = compare({"compile=eager": old}, {"compile=default": new}, *options)
    assert found == status
    assert words in " ".join(output.split())


def test_cells_are_paired_whatever_their_settings_that_are_no_part_of_them(make_run, compare):
    for side in ("old", "new"):
        for seed in ("seed=1", "seed=2"):
            outside = [f"{key}={side}_{seed[-1]}" for key in SETTINGS_OUTSIDE_A_CELL]
            make_run(f"{side}/{seed}", [seed, *outside])
    status, output = compare({}, {})
    assert status == OK
    assert "no regression: 2 no clear change" in output
    assert not any(f"{key}=" in output for key in SETTINGS_OUTSIDE_A_CELL)


def test_runs_that_cannot_be_paired_are_refused_by_name(make_run, compare):
    for name in ("old/1", "old/2"):
        make_run(name, ["seed=1"])
    status, output = compare({}, {})
    assert status == IMPOSSIBLE and "NEW has no runs" in output
    status, output = compare({}, {"seed=1": {}})
    assert status == IMPOSSIBLE and "have the same overrides" in output
