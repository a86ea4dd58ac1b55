"""What the charts are drawn from: ceilings, step times, phases that add up; and what they look like."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from cbexp.report import load_runs, run_rows
from cbexp.report.decode_points import Ceiling, find_decode_point
from cbexp.report.page_charts import charts_of_all, throughput_charts
from cbexp.report.point_labels import label_points
from cbexp.report.step_times import PERCENTS, find_step_times
from cbexp.report.ticks import cut_labels
from cbexp.report.time_use import seconds_by_phase, shares_of_round
from cbexp.report.workloads import find_workloads
from tests.report.conftest import REFERENCE, load_one, write_lines


def charts_of(runs):
    rows = run_rows(runs)
    workloads = find_workloads(rows, runs)
    return [*throughput_charts(workloads, rows).values(), *charts_of_all(runs, rows, workloads)]


# Decode points and their ceiling


def test_ceiling_passes_through_the_recorded_fraction():
    """Of the runs recorded on a GPU: throughput / ceiling is the roofline fraction that the engine has counted."""
    points = [(run, find_decode_point(run)) for run in load_runs([REFERENCE])]
    judged = [(run, point) for run, point in points if point is not None and point.ceiling is not None]
    assert len(judged) >= 2
    for run, point in judged:
        reached = point.tokens_per_s / point.ceiling_tokens_per_s
        assert reached == pytest.approx(run.figure("roofline_fraction"))
        weights = run.engine["plan"]["weight_bytes"]
        assert point.ceiling.weight_bytes == pytest.approx(weights, rel=0.01)


def test_ceiling_of_sliding_layers_stops_growing_at_the_window():
    ceiling = Ceiling(1e12, 1e9, kv_bytes_per_token=1000.0, sliding_share=0.5, window=100.0)
    assert ceiling.kv_bytes(50) == 50_000
    assert ceiling.kv_bytes(300) == 0.5 * 300_000 + 0.5 * 100_000
    assert ceiling.tokens_per_s(8, 300) == pytest.approx(8e12 / (1e9 + 8 * 200_000))


def test_context_is_counted_over_timed_requests_that_can_be(make_run):
    folder = make_run("one")
    assert find_decode_point(load_one(folder)).context == 10 + 25 / 2  # known from fixed lengths
    request = {"round_index": 1, "num_prompt_tokens": 10, "num_tokens": 3}
    write_lines(folder / "requests.jsonl", [request, request | {"round_index": 0, "num_tokens": 99}])
    assert find_decode_point(load_one(folder)).context == (11 + 12) / 2


# Times


def test_step_times_are_percentiles_over_all_timed_decode_steps(make_run):
    """Of a burst's steps each has its share; steps of warmup rounds and prefill do not count."""
    generator = np.random.default_rng(0)
    counts, times_s = generator.integers(1, 9, size=20), generator.random(20)
    step = {"kind": "decode", "round_index": 1, "num_steps": 1, "duration_s": 9.0}
    steps = [
        step | {"num_steps": int(count), "duration_s": float(time_s * count)}
        for count, time_s in zip(counts, times_s, strict=True)
    ]
    folder = make_run("one")
    times = find_step_times(load_one(folder))  # without a record of each step, those of the rounds
    assert (times.p1, times.p50, times.p99, times.has_quartiles) == (0.001, 0.002, 0.004, False)
    write_lines(folder / "steps.jsonl", [*steps, step | {"round_index": 0}, step | {"kind": "prefill"}])
    found = find_step_times(load_one(folder))
    expected = np.percentile(np.repeat(times_s, counts), PERCENTS)
    assert [found.p1, found.p25, found.p50, found.p75, found.p99] == pytest.approx(expected)
    assert found.has_quartiles


def test_phases_add_up_to_the_whole_job(make_run):
    run = load_one(make_run("one", walls_s=(1.0, 1.0, 1.0)))
    phases = seconds_by_phase(run)
    assert sum(phases.values()) == pytest.approx(run.figure("durations_s", "total"))
    expected = {"prepare": 0.5, "load": 1.0, "compile": 2.0, "warmup": 3.0}
    expected |= {"prefill": 0.6, "decode": 2.1, "idle": 0.3}
    assert {name: phases[name] for name in expected} == pytest.approx(expected)
    assert sum(shares_of_round(run).values()) == pytest.approx(1.0)
    chart = next(chart for chart in charts_of([run]) if chart.chart_id == "time_use")
    assert "prepare: recording the environment" in chart.caption
    assert "capture:" not in chart.caption
    without_steps = dict.fromkeys(("prefill_share", "decode_share", "mixed_share", "outside_steps_share"))
    phases = seconds_by_phase(load_one(make_run("one", **without_steps)))
    assert "rounds" in phases and "decode" not in phases


# Labels


def test_labels_are_cut_last_where_they_differ():
    for labels in (
        [f"{'shared=words ' * 20}seed={seed}" for seed in range(5)],
        [f"driver.pythonpath=/a/{'long/' * 30}{end}" for end in ("x", "y", "yz")],
    ):
        cut = cut_labels(labels, 30, 2)
        assert len({tuple(lines) for lines in cut}) == len(labels)
        assert all(len(lines) <= 2 and max(map(len, lines)) <= 30 for lines in cut)
    assert cut_labels(["b=1 a=1", "a=1"], 30, 2) == [["b=1 a=1"], ["a=1"]]


def test_points_that_lie_together_share_a_text():
    for near in ((0.1, 0.52), (0.15, 0.5)):  # a text would cover the other text, or the other point
        labels = label_points([1, 2, 3], [(0.1, 0.5), near, (0.1, 0.9)])
        assert sorted(label.text for label in labels) == ["#1-2", "#3"]


# Figures


def test_figures_are_what_plotly_takes(make_run):
    """plotly's own schema refuses an unknown property; colours by name are the page's, and replaced in it."""
    folders = [REFERENCE, make_run("1", ["seed=1"], status="killed"), make_run("2", ["seed=2"])]
    charts = charts_of(load_runs(folders))
    assert {"throughput_lone", "roofline", "step_times", "time_use"} < {chart.chart_id for chart in charts}
    for chart in charts:
        text = json.dumps(chart.figure, allow_nan=False)
        for color in {word.split('"')[0] for word in text.split('"--')[1:]}:
            text = text.replace(f'"--{color}"', '"#123456"')
        go.Figure(json.loads(text))


def test_failed_runs_are_named_in_the_throughput_chart(make_run):
    folders = [make_run("1", ["seed=1"]), make_run("2", ["seed=2"], status="timed_out")]
    bars, values = charts_of(load_runs(folders))[0].figure["data"]
    assert bars["x"][1] is None
    assert values["text"][1].strip() == "timed out"
    assert charts_of(load_runs(folders[1:])) == []


def test_charts_of_very_many_runs_are_cut_and_say_so(make_run):
    """A browser took minutes to draw 2,000 rows."""
    run = load_one(make_run("one"))
    for chart in charts_of([replace(run, folder=run.folder / str(index)) for index in range(107)]):
        assert "Only the first 100 of 107 runs are drawn" in chart.caption
        assert max(len(trace["y"]) for trace in chart.figure["data"]) <= 100
