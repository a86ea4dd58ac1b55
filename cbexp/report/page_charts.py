"""Which charts a page has, of which runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cbexp.report.charts import Chart, Shown
from cbexp.report.decode_points import find_decode_point
from cbexp.report.labels import short_labels
from cbexp.report.roofline_chart import build_roofline_chart
from cbexp.report.rows import Row
from cbexp.report.run import Run
from cbexp.report.step_times import find_step_times
from cbexp.report.throughput_chart import build_throughput_chart
from cbexp.report.time_charts import build_step_time_chart, build_time_use_chart
from cbexp.report.time_use import seconds_by_phase
from cbexp.report.works import Work

T = TypeVar("T")


def throughput_of_works(works: Sequence[Work], rows: Sequence[Row]) -> dict[str, Chart]:
    """The letter of a work -> its throughput; where there is no other, the runs without figures are named below."""
    short = short_labels([row["label"] for row in rows])
    shown = {work.letter: rows if len(works) == 1 else work.rows for work in works if work.is_contest}
    return {
        letter: build_throughput_chart(f"throughput_{letter}", some, short, has_winner=True)
        for letter, some in shown.items()
    }


def charts_of_all(runs: Sequence[Run], rows: Sequence[Row], works: Sequence[Work]) -> list[Chart]:
    """What is not compared within a work, the roofline, step times, and where the time goes; as far as records tell."""
    charts, has_winner = [], len(works) == 1
    if lone := [row for work in works if not work.is_contest for row in work.rows]:
        short = short_labels([row["label"] for row in rows])
        charts.append(build_throughput_chart("throughput_lone", lone, short, has_winner=False))
    if points := _known(find_decode_point, runs, rows):
        charts.append(build_roofline_chart(points, has_winner))
    if times := _known(find_step_times, runs, rows):
        charts.append(build_step_time_chart(times))
    if seconds := _known(seconds_by_phase, runs, rows):
        charts.append(build_time_use_chart(seconds))
    return charts


def _known(find: Callable[[Run], T | None], runs: Sequence[Run], rows: Sequence[Row]) -> list[Shown[T]]:
    """What is found of the runs, where something is, in the order of the rows."""
    run_of, short = {str(run.folder): run for run in runs}, short_labels([row["label"] for row in rows])
    found = [
        (number, short[row["label"]], find(run_of[row["folder"]])) for number, row in enumerate(rows, start=1)
    ]
    return [Shown(number, label, value) for number, label, value in found if value]
