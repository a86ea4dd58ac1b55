"""The benchmark scripts, with a tiny model on a CPU and a stand-in for vLLM; their tables by hand."""

import csv
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
TINY = {
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 200,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_OVERRIDES = [f"--override=model.architecture.{key}={value}" for key, value in TINY.items()]
# Gives each request its tokens, or one less to the first when SHORT is set; refuses what would not be like the others.
FAKE_VLLM = """
import json, os, pathlib
from types import SimpleNamespace
class SamplingParams(SimpleNamespace): pass
class LLM:
    def __init__(self, model, load_format, enable_prefix_caching, **settings):
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        assert load_format == "dummy" and not enable_prefix_caching
        assert config["architectures"] == ["Qwen3ForCausalLM"] and config["rope_theta"] == 1e6
    def generate(self, prompts, sampling, use_tqdm):
        assert all(params.ignore_eos and params.temperature == 0 for params in sampling)
        assert all(1 not in p["prompt_token_ids"] and 2 not in p["prompt_token_ids"] for p in prompts)
        lengths = [params.max_tokens for params in sampling]
        lengths[0] -= "SHORT" in os.environ
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[3] * length)]) for length in lengths]
"""


@pytest.fixture
def load_script(monkeypatch):
    """Import a script as its neighbours do."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in [name for name, module in sys.modules.items() if is_script(module)]:
        del sys.modules[name]


def is_script(module) -> bool:
    return str(getattr(module, "__file__", None)).startswith(str(SCRIPTS))


@pytest.fixture
def run_script(load_script, monkeypatch, tmp_path):
    """Run a script in `tmp_path` with arguments; returns what it exits with, None when it just ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            load_script(name).main()
        except SystemExit as end:
            return end.code
        return None

    return run


@pytest.fixture
def vllm_site(tmp_path):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    (package / "inputs.py").write_text("TokensPrompt = dict\n")
    return package.parent


@pytest.fixture
def benchmark_rollouts(run_script, vllm_site):
    def benchmark(*arguments):
        return run_script(
            "benchmark_rollouts",
            *("--into", "kept", "--work-dir", "work", "--model", "qwen3_0_6b", "--workloads", "smoke"),
            *("--rounds", 2, "--vllm-pythonpath", vllm_site, "--override", "sampling.ignore_eos=true"),
            *(*TINY_OVERRIDES, *arguments),
        )

    return benchmark


def test_rollouts_of_two_systems_on_the_same_work(tmp_path, benchmark_rollouts, monkeypatch, capsys):
    assert benchmark_rollouts("--systems", "generate", "vllm") is None
    kept = tmp_path / "kept/smoke"
    ours, theirs = (json.loads((kept / f"{name}.json").read_text()) for name in ("generate", "vllm"))
    assert ours["work"] == theirs["work"]
    assert (ours["work"]["num_requests"], ours["work"]["num_output_tokens"]) == (4, 64)
    assert len(ours["wall_times_s"]) == len(theirs["wall_times_s"]) == 2
    expected = 64 / (sum(ours["wall_times_s"]) / 2)
    assert ours["output_tokens_per_s"]["median"] == pytest.approx(expected)
    assert theirs["settings"]["max_num_seqs"] == 4
    assert theirs["settings"]["max_model_len"] == 64  # at most 24 + 16 tokens
    assert ours["versions"]["transformers"] is not None
    table = (tmp_path / "kept/table.md").read_text()
    assert capsys.readouterr().out.endswith(table)
    assert "| smoke | generate | eager |" in table

    # What was measured stays; a run that did less work is no result.
    (kept / "vllm.json").unlink()
    before = (kept / "generate.json").read_bytes()
    monkeypatch.setenv("SHORT", "1")
    failures = benchmark_rollouts("--systems", "generate", "vllm")
    assert "vllm, smoke, round 0: 4 requests with 63 tokens, and 4 with 64 were asked for" in failures
    assert "smoke/generate: measured before" in capsys.readouterr().out
    assert [path.name for path in kept.iterdir()] == ["generate.json"]
    assert (kept / "generate.json").read_bytes() == before


def test_a_system_that_fails_shows_the_end_of_its_log(tmp_path, benchmark_rollouts, vllm_site):
    (vllm_site / "vllm/__init__.py").write_text("raise ImportError('no such library')\n")
    failures = benchmark_rollouts("--only", "*/vllm")
    assert failures.startswith("vllm: exit code 1")
    assert failures.endswith("no such library")
    assert not list((tmp_path / "kept").glob("*/*.json"))


def test_work_that_ends_at_eos_is_refused(tmp_path, benchmark_rollouts):
    assert "smoke ends at EOS" in benchmark_rollouts("--override", "sampling.ignore_eos=false")
    assert not (tmp_path / "work").exists()


def test_records_of_unlike_work_make_no_table(tmp_path, load_script):
    records = load_script("rollout_records")
    workloads = load_script("rollout_workloads")
    (tmp_path / "w").mkdir()
    for system, limits in (("sync", [2, 3]), ("vllm", [3, 2])):  # as many tokens, and not the same ones
        workload = workloads.Workload("w", [[5], [6, 7]], limits, 2)
        record = records.build_record(workload, system, [2.0, 1.0, 4.0], {"set_up_s": 1.0})
        assert record["output_tokens_per_s"] == {"median": 2.5, "min": 1.25, "max": 5.0}
        (tmp_path / f"w/{system}.json").write_text(json.dumps(record))
    with pytest.raises(workloads.UnlikeWorkError, match="of different work"):
        records.write_table(tmp_path)
    assert not (tmp_path / "table.md").exists()


def test_steps_are_timed_in_every_shape(tmp_path, run_script):
    arguments = ["--output", "steps.json", "--models", "qwen3_0_6b", "--batches", 1, 3, "--contexts", 20, 300]
    options = ["--num-steps", 2, "--num-bursts", 3, "--only", "*/1/*", "*/3/20", *TINY_OVERRIDES]
    assert run_script("benchmark_steps", *arguments, *options) is None
    document = json.loads((tmp_path / "steps.json").read_text())
    rows = document["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 20), (1, 300), (3, 20)]
    for row in rows:
        assert row["min_step_ms"] <= row["step_ms"] <= row["max_step_ms"]
        assert row["output_tokens_per_s"] == pytest.approx(1000 * row["batch"] / row["step_ms"])
        assert row["kv_bytes"] == row["batch"] * row["context"] * 2 * (2 * 2 * 8 * 4)
        assert row["roofline_fraction"] is None  # a CPU has no bandwidth worth the name
    with (tmp_path / "steps.csv").open() as file:
        assert [row["context"] for row in csv.DictReader(file)] == ["20", "300", "20"]
    assert document["environment"]["versions"]["torch"] is not None
    assert "never overwritten" in run_script("benchmark_steps", *arguments)


def test_steps_without_a_row_say_so(run_script):
    message = run_script("benchmark_steps", "--output", "x.json", "--only", "nothing/*")
    assert message.startswith("no row matches --only nothing/*")


def test_a_model_that_cannot_be_timed_is_a_row_with_its_error(tmp_path, run_script):
    options = ["--output", "x.json", "--models", "qwen3_0_6b", "--compile-mode", "cuda_graph"]
    assert run_script("benchmark_steps", *options, "--override", "model.device=cpu", *TINY_OVERRIDES) == 1
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert "captures CUDA graphs" in row["error"]


def test_the_reference_rows(load_script):
    steps = load_script("benchmark_steps")
    parse = steps.argparse.Namespace
    all_rows = steps.choose_cells(parse(models=None, batches=None, contexts=None, only=None))
    names = [cell.name for cell in all_rows]
    assert len(names) == len(set(names)) == 3 * 3 + 4
    assert {"qwen3_8b/256/500", "qwen3_4b/1/2000", "qwen3_4b/32/16000"} < set(names)


def test_a_step_is_profiled(tmp_path, run_script, capsys):
    options = ["--model", "qwen3_0_6b", "--batch", 2, "--context", 40, "--num-steps", 2, "--output", "p.json"]
    assert run_script("profile_step", *options, *TINY_OVERRIDES) is None
    figures = json.loads((tmp_path / "p.json").read_text())
    by_name = {row["kernel"]: row for row in figures["kernels"]}
    # Seven projections a layer and the head, of which each step runs all.
    assert by_name["aten::mm"]["calls_per_step"] == 2 * 7 + 1
    parts = {row["part"]: row["bytes"] for row in figures["parts"]}
    assert parts["down projection"] == 2 * 48 * 32 * 4
    assert parts["head and embedding"] == 200 * 32 * 4
    printed = capsys.readouterr().out
    assert "Kernels of a step" in printed
    assert "Floor of each part" in printed


@pytest.fixture
def launches(load_script):
    """Two steps of three layers: a product, attention, a product of the same name; then the head. Once, a fill."""
    event = load_script("kernel_profile").KernelEvent
    events, now = [event("fill", 0.0, 100.0)], 200.0
    for _ in range(2):
        kernels = [("gemm", 10.0), ("paged_attention", 20.0), ("gemm", 30.0)] * 3 + [("head", 50.0)]
        for name, duration in kernels:
            events.append(event(name, now, duration))
            now += duration + 1.0
    return events


def test_kernels_are_counted_by_step_and_layer(load_script, launches):
    rows = load_script("kernel_profile").summarize_kernels(launches, num_steps=2, num_layers=3)
    figures = [
        (row["kernel"], row["calls_per_step"], row["us_per_step"], row["us_per_layer"]) for row in rows
    ]
    assert figures == [
        ("gemm", 6, 120, 40),
        ("paged_attention", 3, 60, 20),
        ("head", 1, 50, None),
    ]


def test_the_kernels_of_a_layer_are_told_apart_by_their_place(load_script, launches):
    rows = load_script("kernel_profile").summarize_layer(launches, num_steps=2, num_layers=3)
    assert [(row["kernel"], row["us"]) for row in rows] == [
        ("paged_attention", 20),
        ("gemm", 30),
        ("gemm", 10),
    ]
    assert all(row["gap_before_us"] == pytest.approx(1) for row in rows)
    assert load_script("kernel_profile").summarize_layer(launches[:3], 2, 3) == []


def test_lines_join_points_that_differ_along_one_axis(load_script):
    def row(batch, context, model="m"):
        return {"model": model, "compile_mode": "eager", "batch": batch, "context": context}

    rows = [row(32, 500), row(1, 500), row(1, 2000), row(8, 500, "other")]
    plot = load_script("plot_steps")
    assert plot.group_lines(rows, "batch", "context") == {"m eager, context 500": [rows[1], rows[0]]}
    assert plot.group_lines(rows, "context", "batch") == {"m eager, batch 1": [rows[1], rows[2]]}


def write_steps(path: Path) -> None:
    row = {"model": "m", "compile_mode": "eager", "context": 500, "floor_ms": 1.0}
    rows = [row | {"batch": batch, "step_ms": 2.0 * batch} for batch in (1, 8)]
    path.write_text(json.dumps({"rows": [*rows, {"model": "n", "compile_mode": "eager", "error": "broken"}]}))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_steps_are_drawn(tmp_path, run_script):
    write_steps(tmp_path / "steps.json")
    assert run_script("plot_steps", "steps.json", "--output", "plots/steps.svg") is None
    assert (tmp_path / "plots/steps.svg").stat().st_size > 1000


def test_drawing_without_matplotlib_says_what_is_missing(tmp_path, run_script, monkeypatch):
    write_steps(tmp_path / "steps.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = run_script("plot_steps", "steps.json", "--output", "x.png")
    assert message == "drawing needs matplotlib: pip install matplotlib"
