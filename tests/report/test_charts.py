"""What the charts are drawn from: ceilings, step times, phases that add up, and works with their winners."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from cbexp.report import load_runs, run_rows
from cbexp.report.agreement import same_completions_share
from cbexp.report.charts import log_scale
from cbexp.report.decode_points import Ceiling, find_decode_point
from cbexp.report.doubts import find_doubts
from cbexp.report.environments import find_differences, shared_facts
from cbexp.report.page import build_page
from cbexp.report.page_charts import MAX_CHARTED_RUNS, MAX_CONTESTS, charts_of_all, throughput_charts
from cbexp.report.point_labels import label_points, place_on
from cbexp.report.step_times import PERCENTS, find_step_times
from cbexp.report.ticks import cut_labels
from cbexp.report.time_use import seconds_by_phase, shares_of_round
from cbexp.report.works import find_works
from tests.report.report_fixtures import REFERENCE, write_json, write_lines


def load_one(folder):
    (run,) = load_runs([folder])
    return run


def figures_of(folders):
    runs = load_runs(folders)
    rows = run_rows(runs)
    works = find_works(rows, runs)
    return [*throughput_charts(works, rows).values(), *charts_of_all(runs, rows, works)]


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


def test_context_is_counted_over_requests_or_known_from_fixed_lengths(make_run):
    folder = make_run("one")
    assert find_decode_point(load_one(folder)).context == 10 + 25 / 2
    rows = [
        {"round_index": 1, "num_prompt_tokens": 10, "num_tokens": 3},
        {"round_index": 0, "num_prompt_tokens": 9, "num_tokens": 99},
    ]
    write_lines(folder / "requests.jsonl", rows)
    assert find_decode_point(load_one(folder)).context == (11 + 12) / 2


SLIDING_PLAN = {
    "kv_bytes_per_token": 1000.0,
    "num_sliding_layers": 2,
    "num_full_layers": 2,
    "sliding_window": 16,
}


@pytest.fixture
def make_decoding_run(make_run):
    """Writes a completed run with every record that its decode point and its ceiling are made of."""

    def make(name):
        folder = make_run(name, [f"seed={name}"], accuracy=0.5, num_judged=500)
        write_json(folder / "engine.json", {"plan": SLIDING_PLAN})
        rows = [{"round_index": 1, "num_prompt_tokens": 10, "num_tokens": 5}] * 2
        write_lines(folder / "requests.jsonl", rows)
        return folder

    return make


@pytest.mark.parametrize(
    ("file", "figure"),
    [
        ("rounds.jsonl", '"mean_decode_batch": 4.0'),
        ("requests.jsonl", '"num_prompt_tokens": 10'),
        ("requests.jsonl", '"num_tokens": 5'),
        ("summary.json", '"bandwidth_bytes_per_s": 1000000000000.0'),
        ("summary.json", '"num_judged": 500'),
        ("summary.json", '"num_rounds": 5'),
        ("summary.json", '"accuracy": 0.5'),
        ("engine.json", '"kv_bytes_per_token": 1000.0'),
        ("engine.json", '"num_sliding_layers": 2'),
    ],
)
@pytest.mark.parametrize("value", [-1, -2, -5000])
def test_figure_that_cannot_be_hides_no_cell(make_decoding_run, file, figure, value):
    folders = [make_decoding_run(name) for name in ("sound", "odd")]
    path = folders[1] / file
    assert figure in path.read_text()
    path.write_text(path.read_text().replace(figure, f"{figure.partition(':')[0]}: {value}"))
    page = build_page(load_runs(folders))
    assert "</html>" in page
    assert "seed=sound" in page
    assert "seed=odd" in page


@pytest.mark.parametrize("value", [-1, 0])
def test_a_batch_that_cannot_be_gives_way_to_those_of_other_rounds(make_decoding_run, value):
    folder = make_decoding_run("odd")
    path = folder / "rounds.jsonl"
    path.write_text(path.read_text().replace('"mean_decode_batch": 4.0', f'"mean_decode_batch": {value}', 4))
    assert find_decode_point(load_one(folder)).batch == 4


def test_requests_whose_lengths_cannot_be_are_not_counted(make_decoding_run):
    folder = make_decoding_run("odd")
    sound = {"round_index": 1, "num_prompt_tokens": 10, "num_tokens": 5}
    write_lines(folder / "requests.jsonl", [sound, sound | {"num_prompt_tokens": -5000}])
    assert find_decode_point(load_one(folder)).context == 10 + 5 / 2


def test_steps_of_a_burst_share_its_time_and_warmup_does_not_count(make_run):
    folder = make_run("one")
    step = {"kind": "decode", "num_steps": 1, "duration_s": 0.001}
    steps = [
        step | {"round_index": 1, "num_steps": 98, "duration_s": 0.098},
        step | {"round_index": 1, "duration_s": 0.5},
        step | {"round_index": 0, "duration_s": 9.0},
        step | {"round_index": 1, "kind": "prefill", "duration_s": 9.0},
    ]
    write_lines(folder / "steps.jsonl", steps)
    times = find_step_times(load_one(folder))
    assert times.p50 == times.p75 == pytest.approx(0.001)
    assert 0.001 < times.p99 < 0.5
    assert times.has_quartiles


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_all_steps_written_out(make_run, seed):
    generator = np.random.default_rng(seed)
    counts, times_s = generator.integers(1, 9, size=20), generator.random(20)
    folder = make_run("one")
    write_lines(
        folder / "steps.jsonl",
        [
            {"kind": "decode", "round_index": 1, "num_steps": int(count), "duration_s": float(time_s * count)}
            for count, time_s in zip(counts, times_s, strict=True)
        ],
    )
    found = find_step_times(load_runs([folder])[0])
    expected = np.percentile(np.repeat(times_s, counts), PERCENTS)
    assert [found.p1, found.p25, found.p50, found.p75, found.p99] == pytest.approx(expected)


def test_step_times_without_steps_come_from_the_rounds(make_run):
    times = find_step_times(load_one(make_run("one")))
    assert (times.p1, times.p50, times.p99, times.has_quartiles) == (0.001, 0.002, 0.004, False)


def test_phases_add_up_to_the_whole_job(make_run):
    run = load_one(make_run("one", walls_s=(1.0, 1.0, 1.0)))
    phases = seconds_by_phase(run)
    assert sum(phases.values()) == pytest.approx(run.figure("durations_s", "total"))
    expected = {"prepare": 0.5, "load": 1.0, "compile": 2.0, "warmup": 3.0}
    expected |= {"prefill": 0.6, "decode": 2.1, "idle": 0.3}
    assert {name: phases[name] for name in expected} == pytest.approx(expected)
    assert sum(shares_of_round(run).values()) == pytest.approx(1.0)


def test_driver_that_tells_no_steps_has_rounds_alone(make_run):
    folder = make_run(
        "one", prefill_share=None, decode_share=None, mixed_share=None, outside_steps_share=None
    )
    assert "rounds" in seconds_by_phase(load_one(folder))
    assert "decode" not in seconds_by_phase(load_one(folder))


def test_winner_is_told_only_within_a_work(make_run):
    folders = [
        make_run("1", ["seed=1"], walls_s=(1.0, 1.01, 1.02)),
        make_run("2", ["seed=2"], walls_s=(2.0, 2.01, 2.02)),
        make_run("3", ["seed=3"], walls_s=(0.1, 0.1, 0.1), workload_hash="b" * 64),
    ]
    runs = load_runs(folders)
    pair, lone = find_works(run_rows(runs), runs)
    assert [row["label"] for row in pair.rows] == ["seed=1", "seed=2"]
    assert pair.lead.ratio.value == pytest.approx(2.01 / 1.01)
    assert pair.lead.ratio.interval.low > 1
    assert (lone.is_contest, lone.lead) == (False, None)
    assert pair.description == "tiny, synthetic, 4 prompts, exactly 25 new tokens"


@pytest.mark.parametrize(
    "labels",
    [
        [f"{'shared=words ' * 20}seed={seed}" for seed in range(5)],
        [f"driver.pythonpath=/a/{'long/' * 30}{end}" for end in ("x", "y", "yz")],
        [f"{'same' * 30}{end}{'tail' * 30}" for end in ("one", "two")] + ["short"],
        [f"{'same' * 30}{end}" for end in ("a1", "a2", "b1", f"b{'b' * 99}1", f"b{'b' * 99}2")],
    ],
)
@pytest.mark.parametrize(("columns", "num_lines"), [(30, 2), (56, 1)])
def test_labels_are_never_cut_before_what_differs(labels, columns, num_lines):
    cut = cut_labels(labels, columns, num_lines)
    assert len({tuple(lines) for lines in cut}) == len(labels)
    assert all(len(lines) <= num_lines and max(map(len, lines)) <= columns for lines in cut)


def test_the_letter_of_a_work_stays_in_front():
    (first, _) = cut_labels([f"K: a=1 b=2 c={'x' * 60}", "K: a=1"], 30, 2)
    assert first[0].startswith("K: b=2")


def test_labels_that_fit_and_labels_that_are_the_same_stay():
    assert cut_labels(["b=1 a=1", "a=1"], 30, 2) == [["b=1 a=1"], ["a=1"]]
    assert len(cut_labels(["long " * 50] * 2, 30, 2)) == 2


def texts_of(places):
    return sorted(label.text for label in label_points(range(1, len(places) + 1), places))


@pytest.mark.parametrize(
    ("places", "texts"),
    [
        ([(0.1, 0.5), (0.1, 0.6), (0.1, 0.9), (0.5, 0.5)], ["#1", "#2", "#3", "#4"]),
        ([(0.1, 0.5), (0.1, 0.52), (0.1, 0.9)], ["#1-2", "#3"]),  # a text would cover the other text
        ([(0.1, 0.5), (0.15, 0.5), (0.1, 0.9)], ["#1-2", "#3"]),  # a text would cover the other point
        ([(0.1, 0.5), (0.9, 0.9)] * 2, ["#1, #3", "#2, #4"]),
        ([(0.1, 0.5), (0.5, 0.9)] * 3, ["#1 and 2 more", "#2 and 2 more"]),
    ],
)
def test_points_that_lie_together_share_a_text(places, texts):
    assert texts_of(places) == texts


def test_texts_stay_in_the_panel():
    (label,) = label_points([12], [(0.97, 0.5)])
    assert label.is_left
    assert label.span[0] > 0


def test_many_points_in_a_heap_are_labelled_soon():
    generator = np.random.default_rng(1)
    places = [tuple(place) for place in generator.random((MAX_CHARTED_RUNS, 2)).tolist()]
    started_s = time.process_time()
    labels = label_points(range(MAX_CHARTED_RUNS), places)
    assert time.process_time() - started_s < 5
    assert sorted(index for label in labels for index in label.members) == list(range(MAX_CHARTED_RUNS))


def test_places_of_points_are_shares_of_the_panel():
    assert place_on({"range": [0, 50]}, 25) == 0.5
    assert place_on(log_scale(1, 100), 10) == pytest.approx(0.5)


def test_time_chart_says_what_its_phases_are(make_run):
    chart = next(chart for chart in figures_of([make_run("one")]) if chart.chart_id == "time_use")
    assert "prepare: recording the environment" in chart.caption
    assert "other: judging" in chart.caption
    assert "capture:" not in chart.caption


def test_figures_are_what_plotly_takes(make_run):
    """plotly's own schema refuses an unknown property; colours by name are the page's, and replaced in it."""
    folders = [REFERENCE, make_run("1", ["seed=1"], status="killed"), make_run("2", ["seed=2"])]
    charts = figures_of(folders)
    ids = {chart.chart_id for chart in charts}
    assert {"throughput_lone", "roofline", "step_times", "time_use"} < ids
    for chart in charts:
        text = json.dumps(chart.figure, allow_nan=False)
        colors = {word.split('"')[0] for word in text.split('"--')[1:]}
        for color in colors:
            text = text.replace(f'"--{color}"', '"#123456"')
        go.Figure(json.loads(text))


def test_failed_runs_are_named_in_the_throughput_chart(make_run):
    folders = [make_run("1", ["seed=1"]), make_run("2", ["seed=2"], status="timed_out")]
    (bars, values) = figures_of(folders)[0].figure["data"]
    assert bars["x"][1] is None
    assert values["text"][1].strip() == "timed out"


def test_runs_without_any_figures_have_no_charts(make_run):
    assert figures_of([make_run("1", status="failed")]) == []


def test_completions_are_compared_request_by_request(make_run):
    one, other = make_run("1", digest="x"), make_run("2", digest="y")
    assert same_completions_share(*load_runs([one, make_run("3", digest="x")])) == 1.0
    assert same_completions_share(*load_runs([one, other])) is None
    for folder, digests in ((one, "aabb"), (other, "aabc")):
        rows = [{"round_index": index, "completion_digest": d} for index in (0, 1) for d in digests]
        write_lines(folder / "requests.jsonl", rows)
    assert same_completions_share(*load_runs([one, other])) == 0.75


def gpu_environment(num_mib=4, pids=(), is_dirty=False, max_sm_mhz=1980):
    state = {
        "uuid": "GPU-1",
        "max_sm_mhz": max_sm_mhz,
        "max_memory_mhz": 3201,
        "power_limit_w": 700,
        "memory_used_mib": num_mib,
    }
    return {
        "versions": {"torch": "2.11.0"},
        "source": {"commit": "c" * 40, "is_dirty": is_dirty},
        "cuda": {
            "devices": [{"name": "NVIDIA H200"}],
            "gpu_states": [state],
            "processes": [{"uuid": "GPU-1", "pid": pid, "memory_used_mib": 1} for pid in pids],
        },
    }


def test_a_clean_run_leaves_no_doubts(make_run):
    run = load_one(make_run("1", walls_s=(1.0, 1.0, 1.0), environment=gpu_environment(pids=[1])))
    assert find_doubts([run]) == {}
    assert shared_facts([run])["GPU"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("arguments", "doubt"),
    [
        ({"environment": gpu_environment(is_dirty=True)}, "uncommitted changes"),
        ({"environment": gpu_environment(pids=[1, 77])}, "1 other process(es) on the GPU"),
        ({"environment": gpu_environment(num_mib=30_000)}, "GPU memory in use when the run started: 29 GiB"),
        ({"walls_s": (1.0, 2.0, 3.0)}, "varies by more than ±5%"),
        ({"are_rounds_identical": False}, "completions differ between timed rounds"),
        ({"num_short": 2}, "ended below the fixed length"),
        ({"accuracy": 0.0, "num_judged": 12}, "accuracy means little"),
        ({"warnings": ["cache is small"]}, "cache is small"),
    ],
)
def test_doubts_are_told(make_run, arguments, doubt):
    run = load_one(make_run("1", **{"walls_s": (1.0, 1.0, 1.0)} | arguments))
    assert any(doubt in sentence for sentence in find_doubts([run])), find_doubts([run])


@pytest.mark.parametrize("judged", [{"num_judged": 0}, {"num_judged": 12, "is_fixed_length": False}])
def test_accuracy_is_doubted_only_where_answers_are_judged_past_their_ends(make_run, judged):
    run = load_one(make_run("1", walls_s=(1.0, 1.0, 1.0), **judged))
    assert find_doubts([run]) == {}


def test_differences_of_clocks_versions_and_variables_are_found(make_run):
    one, other = gpu_environment(), gpu_environment(max_sm_mhz=1200)
    other["versions"] = {"torch": "2.13.0"}
    other["variables"] = {"OMP_NUM_THREADS": "1"}
    runs = load_runs([make_run("1", environment=one), make_run("2", environment=other)])
    facts = {difference.fact: set(difference.values) for difference in find_differences(runs)}
    assert set(facts) == {"GPU clocks and power", "torch", "$OMP_NUM_THREADS"}
    assert facts["torch"] == {"2.11.0", "2.13.0"}
    assert facts["$OMP_NUM_THREADS"] == {"1", "not recorded"}


def test_a_run_that_recorded_no_environment_makes_no_difference(make_run):
    failed = make_run("2", status="failed")
    write_json(failed / "environment.json", {})
    assert find_differences(load_runs([make_run("1"), failed])) == []


def test_charts_of_thousands_of_runs_are_cut_and_say_so(make_run):
    """A browser took minutes to draw 2,000 rows."""
    (run,) = load_runs([make_run("one", ["model=tiny"])])
    runs = [
        replace(run, folder=run.folder / str(index), overrides=(f"seed={index}",))
        for index in range(MAX_CHARTED_RUNS + 7)
    ]
    rows = run_rows(runs)
    works = find_works(rows, runs)
    charts = [*throughput_charts(works, rows).values(), *charts_of_all(runs, rows, works)]
    assert charts[0].chart_id == "throughput_A"
    for chart in charts:
        assert "Only the first 100 of 107 runs are drawn" in chart.caption
        assert max(len(trace["y"]) for trace in chart.figure["data"]) <= MAX_CHARTED_RUNS
    assert build_page(runs).count("<tbody") == 107


def test_works_without_a_chart_are_told(make_run):
    (run,) = load_runs([make_run("one", ["model=tiny"])])
    runs = [
        replace(
            run,
            folder=run.folder / str(index),
            overrides=(f"seed={index}",),
            summary={**run.summary, "workload_hash": str(index // 2)},
        )
        for index in range(2 * (MAX_CONTESTS + 3))
    ]
    page = build_page(runs)
    assert "3 more works have no chart of their own" in page
    assert page.count('class="hero"') == MAX_CONTESTS
