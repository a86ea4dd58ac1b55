"""Two reports: regressions beyond the noise are found, noise is not one, and CI sees it by the exit status."""

from __future__ import annotations

import pytest

from cbexp.cell_settings import SETTINGS_OUTSIDE_A_CELL
from cbexp.report.command_line import main
from tests.report.report_fixtures import OTHER_WORKLOAD

STEADY = {"walls_s": (1.0, 1.01, 1.02, 1.03, 1.04)}
SLOWER = {"walls_s": (1.1, 1.111, 1.122, 1.133, 1.144)}
FLAT = {"walls_s": (1.0, 1.0, 1.0)}
FLAT_AND_SLOWER = {"walls_s": (1.05, 1.05, 1.05)}
FAILED = {"status": "failed"}


@pytest.fixture
def compare(make_run, tmp_path, capsys):
    """Compares cells (arguments of `make_run` by override); returns exit status and output, its words in one line."""

    def run(old, new, *options):
        for side, cells in (("old", old), ("new", new)):
            for index, (override, arguments) in enumerate(cells.items()):
                make_run(f"{side}/{index}", [override], **arguments)
        status = main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options])
        return status, capsys.readouterr().out

    return run


def verdict_of(output, label):
    (line,) = [line for line in output.splitlines() if line.strip().startswith(label)]
    return line


def test_slower_beyond_the_noise_is_a_regression(compare):
    cells = {"seed=1": STEADY, "seed=2": STEADY}
    status, output = compare(cells, cells | {"seed=2": SLOWER})
    assert status == 1
    assert "no clear change" in verdict_of(output, "seed=1")
    assert "slower" in verdict_of(output, "seed=2")
    assert "REGRESSION: 1 slower, 1 no clear change" in output
    assert "lies below 0.98" in " ".join(output.split())


@pytest.mark.parametrize(
    ("old", "new", "options", "expected"),
    [
        ({"walls_s": (0.8, 1.0, 1.1, 1.2, 1.5)}, {"walls_s": (0.85, 1.05, 1.15, 1.25, 1.55)}, [], 0),
        (FLAT, FLAT_AND_SLOWER, [], 1),
        (FLAT, FLAT_AND_SLOWER, ["--threshold", "0.1"], 0),
    ],
)
def test_slower_within_noise_or_threshold_is_none(compare, old, new, options, expected):
    status, output = compare({"seed=1": old}, {"seed=1": new}, *options)
    assert status == expected
    assert ("no clear change" in output) == (expected == 0)


def test_faster_passes(compare):
    status, output = compare({"seed=1": SLOWER}, {"seed=1": STEADY})
    assert status == 0
    assert "faster" in verdict_of(output, "night")


@pytest.mark.parametrize("status", ["failed", "timed_out"])
def test_a_cell_that_completed_and_does_no_more_is_a_regression(compare, status):
    cells = {"seed=1": {}, "seed=2": {}}
    code, output = compare(cells, cells | {"seed=2": {"status": status, "message": "why it did"}})
    assert code == 1
    assert "failed" in verdict_of(output, "seed=2")
    assert "why it did" in output


def test_a_missing_cell_is_a_regression_and_a_new_one_is_not(compare):
    code, output = compare({"seed=1": {}, "seed=2": {}}, {"seed=1": {}, "seed=3": {}})
    assert code == 1
    assert "missing" in verdict_of(output, "seed=2")
    assert "new" in verdict_of(output, "seed=3")


def test_a_cell_that_failed_before_is_ignored(compare):
    cells = {"seed=1": {}, "seed=2": FAILED}
    code, output = compare(cells, cells)
    assert code == 0
    assert "ignored" in verdict_of(output, "seed=2")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ({}, {"workload_hash": OTHER_WORKLOAD}, "different workloads"),
        ({"walls_s": (1.0, 1.0)}, {"walls_s": (9.0, 9.0)}, "fewer than 3 timed rounds"),
        (FAILED, FAILED, ""),
    ],
)
def test_what_cannot_be_compared_is_unclear_and_ci_does_not_pass(compare, old, new, reason):
    code, output = compare({"seed=1": old}, {"seed=1": new})
    assert code == 3
    assert reason in " ".join(output.split())
    assert "UNCLEAR whether there is a regression" in output


@pytest.mark.parametrize(("accuracy", "expected"), [(0.5, 1), (0.88, 0)])
def test_less_accurate_is_a_regression_beyond_chance_alone(compare, accuracy, expected):
    judged = {"num_judged": 500, "num_rounds": 5}
    cells = [{"seed=1": {"accuracy": value, **judged}} for value in (0.9, accuracy)]
    assert compare(*cells)[0] == expected


def test_environments_that_differ_are_shown_by_side(compare):
    new = {"seed=1": {"environment": {"versions": {"torch": "9.9"}}}}
    assert "differs: torch: 2.11.0 (OLD), 9.9 (NEW)" in compare({"seed=1": {}}, new)[1]


# Pairs


@pytest.mark.parametrize("key", SETTINGS_OUTSIDE_A_CELL)
def test_cells_are_paired_whatever_their_settings_that_are_no_part_of_them(make_run, tmp_path, capsys, key):
    for side in ("old", "new"):
        for seed in ("seed=1", "seed=2"):
            make_run(f"{side}/{seed}", [seed, f"{key}={side}_{seed[-1]}"])
    status = main(["compare", str(tmp_path / "old"), str(tmp_path / "new")])
    output = capsys.readouterr().out
    assert status == 0
    assert "no regression: 2 no clear change" in output
    assert key not in output


def test_two_single_runs_compare_whatever_they_set(compare):
    code, output = compare({"compile=eager": STEADY}, {"compile=default": SLOWER})
    assert code == 1
    assert "slower" in output


def test_runs_that_cannot_be_paired_are_refused_by_name(make_run, tmp_path, capsys):
    for name in ("old/1", "old/2", "new/1"):
        make_run(name, ["seed=1"])
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert "have the same overrides" in capsys.readouterr().err


def test_empty_side_and_bad_threshold_are_refused(make_run, tmp_path, capsys):
    folder = make_run("old/1")
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(folder), str(tmp_path / "empty")]) == 2
    assert "NEW has no runs" in capsys.readouterr().err
    assert main(["compare", str(folder), str(folder), "--threshold", "2"]) == 2
    assert "outside [0, 1)" in capsys.readouterr().err
