"""Which charts a page has, of which runs."""

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
from cbexp.report.works import Work, letters_of

T = TypeVar("T")
LONE = "lone"
# More would take a browser minutes to draw, and nobody would read them.
MAX_CHARTED_RUNS, MAX_CONTESTS = 100, 20


def shown_contests(works: Sequence[Work]) -> list[Work]:
    """The works that have a winner and a chart of their own; those with most runs where there are too many."""
    return [work for work in works if work.is_contest][:MAX_CONTESTS]


def throughput_charts(works: Sequence[Work], rows: Sequence[Row]) -> dict[str, Chart]:
    """The letter of a work -> its throughput, and under `LONE` that of runs without anybody to compare with.

    Where there is one work alone, its chart names the runs without figures as well.
    """
    short = shorten({row["folder"]: row["label_in_work"] for row in rows})

    def draw(name: str, some: Sequence[Row], has_winner: bool) -> Chart:
        return _draw(lambda few: build_throughput_chart(f"throughput_{name}", few, short, has_winner), some)

    charts = {
        work.letter: draw(work.letter, rows if len(works) == 1 else work.rows, has_winner=True)
        for work in shown_contests(works)
    }
    lone = [row for work in works if not work.is_contest for row in work.rows]
    if lone:
        charts[LONE] = draw(LONE, lone, has_winner=False)
    return charts


def charts_of_all(runs: Sequence[Run], rows: Sequence[Row], works: Sequence[Work]) -> list[Chart]:
    """The roofline, the distribution of step times, and where the time goes; those that the records can fill."""
    charts, labels = [], _labels_of_all(rows, works)
    if points := _known(find_decode_point, runs, labels):
        charts.append(_draw(lambda few: build_roofline_chart(few, has_winner=len(works) == 1), points))
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
    told = f"Only the first {MAX_CHARTED_RUNS} of {len(of_runs):,} runs are drawn; the table has them all."
    return replace(chart, caption=f"{chart.caption} {told}")


def _labels_of_all(rows: Sequence[Row], works: Sequence[Work]) -> dict[str, str]:
    """The folder of each row -> its label, and before it the letter of its work where there are several."""
    letters = letters_of(works) if len(works) > 1 else {}
    short = shorten({row["folder"]: row["label_in_work"] for row in rows})
    return {
        folder: f"{letters[folder]}: {label}" if folder in letters else label
        for folder, label in short.items()
    }


def _known(find: Callable[[Run], T | None], runs: Sequence[Run], labels: Mapping[str, str]) -> list[Shown[T]]:
    """What is found of the runs, where something is, in the order of the labels, which is that of the table."""
    run_of = {str(run.folder): run for run in runs}
    found = [
        (number, label, find(run_of[folder]))
        for number, (folder, label) in enumerate(labels.items(), start=1)
    ]
    return [Shown(number, label, value) for number, label, value in found if value]
