"""Which charts the page has, and the runs in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from cbexp.report.charts import Chart, Shown
from cbexp.report.decode_points import find_decode_point
from cbexp.report.labels import shorten
from cbexp.report.roofline_chart import build_roofline_chart
from cbexp.report.rows import Row
from cbexp.report.run import Run
from cbexp.report.step_times import find_step_times
from cbexp.report.throughput_chart import build_throughput_chart
from cbexp.report.time_charts import build_step_time_chart, build_time_use_chart
from cbexp.report.time_use import seconds_by_phase
from cbexp.report.workloads import Workload, letters_of

T = TypeVar("T")
LONE = "lone"
# More would take a browser minutes to draw, and nobody would read them.
MAX_CHARTED_RUNS, MAX_CHARTED_WORKLOADS = 100, 20


def charted_workloads(workloads: Sequence[Workload]) -> list[Workload]:
    """The first `MAX_CHARTED_WORKLOADS` workloads that have a winner; each gets a chart of its own."""
    return [workload for workload in workloads if workload.has_winner][:MAX_CHARTED_WORKLOADS]


def throughput_charts(workloads: Sequence[Workload], rows: Sequence[Row]) -> dict[str, Chart]:
    """A throughput chart by each workload's letter, and one under `LONE` for runs with nothing to compare with.

    If there is only one workload, its chart also shows the runs without figures.
    """
    short = shorten({row["folder"]: row["label_in_work"] for row in rows})

    def draw(name: str, some: Sequence[Row], has_winner: bool) -> Chart:
        return _draw(lambda few: build_throughput_chart(f"throughput_{name}", few, short, has_winner), some)

    charts = {
        workload.letter: draw(
            workload.letter, rows if len(workloads) == 1 else workload.rows, has_winner=True
        )
        for workload in charted_workloads(workloads)
    }
    lone = [row for workload in workloads if not workload.has_winner for row in workload.rows]
    if lone:
        charts[LONE] = draw(LONE, lone, has_winner=False)
    return charts


def charts_of_all(runs: Sequence[Run], rows: Sequence[Row], workloads: Sequence[Workload]) -> list[Chart]:
    """The charts of roofline, step times and time use, as far as the records have them."""
    charts, labels = [], _labels_of_all(rows, workloads)
    if points := _known(find_decode_point, runs, labels):
        charts.append(_draw(lambda few: build_roofline_chart(few, has_winner=len(workloads) == 1), points))
    if times := _known(find_step_times, runs, labels):
        charts.append(_draw(build_step_time_chart, times))
    if seconds := _known(seconds_by_phase, runs, labels):
        charts.append(_draw(build_time_use_chart, seconds))
    return charts


def _draw(build: Callable[[Sequence[T]], Chart], of_runs: Sequence[T]) -> Chart:
    """The chart of the first `MAX_CHARTED_RUNS`; it says so where there are more."""
    chart = build(of_runs[:MAX_CHARTED_RUNS])
    if len(of_runs) <= MAX_CHARTED_RUNS:
        return chart
    remark = f"Only the first {MAX_CHARTED_RUNS} of {len(of_runs):,} runs are drawn; the table has them all."
    return replace(chart, caption=f"{chart.caption} {remark}")


def _labels_of_all(rows: Sequence[Row], workloads: Sequence[Workload]) -> dict[str, str]:
    """Each row's folder with its label, after the workload's letter where there are several workloads."""
    letters = letters_of(workloads) if len(workloads) > 1 else {}
    short = shorten({row["folder"]: row["label_in_work"] for row in rows})
    return {
        folder: f"{letters[folder]}: {label}" if folder in letters else label
        for folder, label in short.items()
    }


def _known(find: Callable[[Run], T | None], runs: Sequence[Run], labels: Mapping[str, str]) -> list[Shown[T]]:
    """What `find` returns for each run, without None or empty values, in the order of the table."""
    run_of = {str(run.folder): run for run in runs}
    found = [
        (number, label, find(run_of[folder]))
        for number, (folder, label) in enumerate(labels.items(), start=1)
    ]
    return [Shown(number, label, value) for number, label, value in found if value]
