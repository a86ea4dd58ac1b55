"""Two reports: regressions beyond the noise are found, noise is not one, and CI hears of it by the exit status."""

from __future__ import annotations

import pytest

from cbexp.cell_settings import SETTINGS_OUTSIDE_A_CELL
from cbexp.report.command_line import main

STEADY = (1.0, 1.01, 1.02, 1.03, 1.04)
SLOWER = tuple(1.1 * wall_s for wall_s in STEADY)
NOISY = (0.8, 1.0, 1.1, 1.2, 1.5)
NOISY_AND_SLOWER = (0.85, 1.05, 1.15, 1.25, 1.55)


@pytest.fixture
def compare(make_run, tmp_path, capsys):
    """Compares runs given as keyword arguments of `make_run`, by override; returns exit status and output."""

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
    cells = {"seed=1": {"walls_s": STEADY}, "seed=2": {"walls_s": STEADY}}
    status, output = compare(cells, cells | {"seed=2": {"walls_s": SLOWER}})
    assert status == 1
    assert "no clear change" in verdict_of(output, "seed=1")
    assert "slower" in verdict_of(output, "seed=2")
    assert "REGRESSION: 1 slower, 1 no clear change" in output
    assert "lies below 0.98" in " ".join(output.split())


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


def test_slower_within_the_noise_is_none(compare):
    status, output = compare({"seed=1": {"walls_s": NOISY}}, {"seed=1": {"walls_s": NOISY_AND_SLOWER}})
    assert status == 0
    assert "no clear change" in output


def test_slower_within_the_threshold_is_none(compare):
    a_little = tuple(1.05 * wall_s for wall_s in (1.0, 1.0, 1.0))
    cells = {"seed=1": {"walls_s": (1.0, 1.0, 1.0)}}
    assert compare(cells, {"seed=1": {"walls_s": a_little}}, "--threshold", "0.1")[0] == 0


def test_the_same_run_slower_than_the_default_threshold_is_one(compare):
    cells = {"seed=1": {"walls_s": (1.0, 1.0, 1.0)}}
    assert compare(cells, {"seed=1": {"walls_s": (1.05, 1.05, 1.05)}})[0] == 1


def test_faster_is_said_and_passes(compare):
    status, output = compare({"seed=1": {"walls_s": SLOWER}}, {"seed=1": {"walls_s": STEADY}})
    assert status == 0
    assert "faster" in verdict_of(output, "night")


@pytest.mark.parametrize(("status", "verdict"), [("failed", "failed"), ("timed_out", "failed")])
def test_a_cell_that_completed_and_does_no_more_is_a_regression(compare, status, verdict):
    cells = {"seed=1": {}, "seed=2": {}}
    code, output = compare(cells, cells | {"seed=2": {"status": status, "message": "why it did"}})
    assert code == 1
    assert verdict in verdict_of(output, "seed=2")
    assert "why it did" in output


def test_a_cell_that_is_missing_is_a_regression_and_a_new_one_is_not(compare):
    code, output = compare({"seed=1": {}, "seed=2": {}}, {"seed=1": {}, "seed=3": {}})
    assert code == 1
    assert "missing" in verdict_of(output, "seed=2")
    assert "new" in verdict_of(output, "seed=3")


def test_a_cell_that_failed_before_is_ignored(compare):
    failed = {"seed=1": {}, "seed=2": {"status": "failed"}}
    code, output = compare(failed, failed)
    assert code == 0
    assert "ignored" in verdict_of(output, "seed=2")


def test_other_work_is_not_compared_and_ci_does_not_pass(compare):
    code, output = compare({"seed=1": {}}, {"seed=1": {"workload_hash": "b" * 64}})
    assert code == 3
    assert "different work" in " ".join(output.split())
    assert output.endswith("UNCLEAR whether there is a regression: 1 unclear\n")
    assert "new / old" in output


def test_too_few_rounds_are_unclear_and_ci_does_not_pass(compare):
    code, output = compare({"seed=1": {"walls_s": (1.0, 1.0)}}, {"seed=1": {"walls_s": (9.0, 9.0)}})
    assert code == 3
    assert "fewer than 3 timed rounds" in " ".join(output.split())


def test_nothing_that_completed_on_either_side_does_not_pass(compare):
    failed = {"seed=1": {"status": "failed"}}
    assert compare(failed, failed)[0] == 3


def test_less_accurate_beyond_chance_is_a_regression(compare):
    judged = {"num_judged": 500, "num_rounds": 5}
    cells = {"seed=1": {"accuracy": 0.9, **judged}}
    assert compare(cells, {"seed=1": {"accuracy": 0.5, **judged}})[0] == 1


def test_less_accurate_by_chance_is_none(compare):
    judged = {"num_judged": 500, "num_rounds": 5}
    assert compare({"seed=1": {"accuracy": 0.9, **judged}}, {"seed=1": {"accuracy": 0.88, **judged}})[0] == 0


def test_two_single_runs_compare_whatever_they_set(compare):
    code, output = compare({"compile=eager": {"walls_s": STEADY}}, {"compile=default": {"walls_s": SLOWER}})
    assert code == 1
    assert "slower" in output


def test_environments_that_differ_are_shown_by_side(compare):
    new = {"seed=1": {"environment": {"versions": {"torch": "9.9"}}}}
    output = compare({"seed=1": {}}, new)[1]
    assert "differs: torch: 2.11.0 (OLD), 9.9 (NEW)" in output


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
