"""What the command prints and writes: the whole report, the files, and errors that say what would be right."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest

from cbexp.report import format_report, format_table, load_runs, run_rows
from cbexp.report.answers import same_completions_share
from cbexp.report.command_line import main
from cbexp.report.page import build_page
from tests.report.conftest import words_of, write_lines

STATE = {"uuid": "GPU-1", "max_sm_mhz": 1980, "max_memory_mhz": 3201, "power_limit_w": 700}
GPU = {
    "driver": "580",
    "runtime": "13.0",
    "devices": [{"name": "NVIDIA H200"}],
    "gpu_states": [STATE | {"memory_used_mib": 30_000}],
    "processes": [{"uuid": "GPU-1", "pid": pid} for pid in (1, 77)],
}
DOUBTFUL = {
    "versions": {"torch": "2.11.0", "vllm": None},
    "variables": {"OMP_NUM_THREADS": "1"},
    "python": "3.12",
    "platform": "Linux",
    "source": {"commit": "c" * 40, "is_dirty": True},
    "cpu": {"model": "EPYC", "num_usable_cores": 8, "num_threads": 2},
    "cuda": GPU,
}


@pytest.fixture
def sweep(make_run, tmp_path):
    """A steady run, a faster one with everything that makes it doubtful, and two without figures."""
    right, wrong = {"num_judged": 500, "accuracy": 0.9}, {"num_judged": 500, "accuracy": 0.5}
    wrong |= {"are_rounds_identical": False, "num_short": 2, "warnings": ["cache is small"]}
    wrong |= {"rescoring": {"num_completions": 0, "num_tokens": 0, "note": "rescore.completions=0"}}
    walls_s = (1.0, 1.25, 1.0, 0.9, 1.0)
    make_run("sweep/0", ["model=tiny", "compile=eager"], (2.0,) * 5, **right, is_fixed_length=False)
    make_run("sweep/1", ["model=tiny", "compile=default"], walls_s, environment=DOUBTFUL, **wrong)
    failed = {"message": "2 GiB\ntoo much", "error_class": "OutOfMemoryError"}
    make_run("sweep/2", ["model=tiny", "compile=cuda_graph"], status="out_of_memory", **failed)
    make_run("sweep/3", ["model=tiny", "name2=[red]x[/red]\x1b"], status="not_applicable")
    return tmp_path / "sweep"


REPORT = """\
 #   cell                  status           output tok/s   spread   ratio     memory   roofline   accuracy
 ─────────────────────────────────────────────────────────────────────────────────────────────────────────
 1   compile=default       completed                 100   ±15.6%   2.00x   1.50 GiB      50.0%      50.0%
 2   compile=eager         completed                  50    ±0.0%   1.00x   1.50 GiB      50.0%      90.0%
 3   compile=cuda_graph    out_of_memory               -        -       -          -          -          -
 4   name2=[red]x[/red]?   not_applicable              -        -       -          -          -          -

#1 is ahead of #2 beyond the noise: 2.00x (1.60 to 2.22); \
its answers are wrong more often than those of #2, beyond chance
ratio to #2, compile=eager (the slowest)

out_of_memory: compile=cuda_graph
  OutOfMemoryError: 2 GiB
  too much
  {sweep}/2

note: throughput varies by more than ±5% between rounds (#1)
note: completions differ between timed rounds of the same prompts (#1)
note: some requests ended below the fixed length (#1)
note: answers were judged although sampling.ignore_eos=true wrote on past their ends: accuracy means little (#1)
note: no completion was rescored: rescore.completions=0 (#1)
note: cache is small (#1)
note: uncommitted changes: the commit does not say what ran (#1)
note: 1 other process(es) on the GPU when the run started (#1)
note: GPU memory in use when the run started: 29 GiB (#1)
note: fewer correct completions than another run of the same workload, beyond chance (#1)
differs: GPU: not recorded (#2-4), NVIDIA H200 (#1)
differs: GPU driver: not recorded (#2-4), 580 (#1)
differs: CUDA: not recorded (#2-4), 13.0 (#1)
differs: commit: not recorded (#2-4), cccccccccccc (#1)
differs: uncommitted changes: not recorded (#2-4), yes (#1)
differs: CPU: not recorded (#2-4), EPYC, 8 usable cores (#1)
differs: CPU threads: not recorded (#2-4), 2 (#1)
differs: platform: not recorded (#2-4), Linux (#1)
differs: Python: not recorded (#2-4), 3.12 (#1)
differs: GPU clocks and power: not recorded (#2-4), at most 1980 MHz, memory 3201 MHz, 700 W (#1)
differs: vllm: not recorded (#2-4), not installed (#1)
differs: $OMP_NUM_THREADS: not recorded (#2-4), 1 (#1)
"""


def test_report_has_the_table_the_failures_and_the_doubts(sweep, capsys):
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out.splitlines() == REPORT.replace("{sweep}", str(sweep)).splitlines()
    card = "Its answers are wrong more often than those of #2, beyond chance: 90.0% of those"
    assert card in words_of(build_page(load_runs([sweep])))


def test_what_rescoring_found_is_shown_where_it_is_known(make_run, capsys):
    figures = {"kl": 1.2e-4, "max_logprob_difference": 0.5, "beyond_cap_share": 0.0}
    make_run("sweep/0", ["rescore.completions=3"], rescoring={"num_completions": 3, "note": None} | figures)
    folder = make_run("sweep/1", [], (2.0,) * 5).parent
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("accuracy        KL")
    assert [line.split()[-1] for line in lines[2:4]] == ["0.00012", "-"]
    assert "0.00012" in words_of(build_page(load_runs([folder])))
    assert "rescore.completions" not in "".join(lines)  # it makes no other configuration


def test_steady_runs_alike_leave_no_notes(make_run):
    own = GPU | {"gpu_states": [STATE | {"memory_used_mib": 4}], "processes": [{"uuid": "GPU-1", "pid": 1}]}
    runs = load_runs([make_run(mode, [mode], (1.0,) * 3, environment={"cuda": own}) for mode in "ab"])
    assert "note:" not in (text := format_report(runs)) and "differs:" not in text


def test_memory_is_named_by_its_kind(make_run):
    runs = load_runs([make_run("one", peak_allocated_gib=None, roofline_fraction=None)])
    assert "0.50 GiB host" in format_table(runs)
    # vLLM's allocator is in another process: what is known is what it took in all.
    runs = load_runs([make_run("one", peak_allocated_gib=None, peak_reserved_gib=112.5)])
    assert "112.50 GiB reserved" in format_table(runs)


def test_completions_are_compared_request_by_request(make_run):
    one, other = make_run("1", digest="x"), make_run("2", digest="y")
    assert same_completions_share(*load_runs([one, make_run("3", digest="x")])) == 1.0
    assert same_completions_share(*load_runs([one, other])) is None
    for folder, digests in ((one, "aabb"), (other, "aabc")):
        rows = [{"round_index": index, "completion_digest": d} for index in (0, 1) for d in digests]
        write_lines(folder / "requests.jsonl", rows)
    assert same_completions_share(*load_runs([one, other])) == 0.75
    # Sampled ones may differ and be right.
    for folder in (one, other):
        summary = json.loads((folder / "summary.json").read_text()) | {"do_sample": True}
        (folder / "summary.json").write_text(json.dumps(summary))
    assert same_completions_share(*load_runs([one, other])) is None


def test_groups_have_a_column_where_there_are_any_and_sampling_is_part_of_the_workload(make_run):
    groups = {"pass_at_1": 0.5, "pass_at_k": 0.75, "k": 8, "all_right_share": 0.25, "verdict_std": 0.1}
    sampled = {"do_sample": True, "sampling": {"temperature": 1.0, "top_k": 5}, "workload_hash": "c" * 64}
    plain, one = make_run("1"), make_run("2", ["sampling=sampled"], groups=groups, **sampled)
    assert "pass@k" not in format_table(load_runs([plain]))
    text = format_table(load_runs([one, plain]))
    assert "pass@k" in text
    assert "75.0%" in text
    assert "sampled with temperature=1.0 top_k=5" in text
    assert "k = 8" in build_page(load_runs([one, plain]), None)


def test_csv_and_json_have_every_figure(sweep, tmp_path, capsys):
    assert main([str(sweep), "--csv", str(tmp_path / "a.csv"), "--json", str(tmp_path / "new/a.json")]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    objects = json.loads((tmp_path / "new/a.json").read_text())
    assert objects == run_rows(load_runs([sweep]))
    expected = {"label": "compile=default", "output_tokens_per_s": 100.0, "ratio": 2.0, "ratio_low": 1.6}
    expected |= {"total_s": 11.9, "decode_step_s_p99": 0.004, "mean_batch": 4.0, "baseline": "compile=eager"}
    expected |= {"command": "python -m cbexp model=tiny compile=default", "same_completions_share": 1.0}
    assert expected.items() <= objects[0].items()
    as_text = [{name: "" if value is None else str(value) for name, value in row.items()} for row in objects]
    assert rows == as_text
    capsys.readouterr()
    assert main([str(sweep), "--csv", "-"]) == 0
    assert list(csv.DictReader(io.StringIO(capsys.readouterr().out))) == rows  # and nothing else


def test_markdown_escapes_what_would_be_markup(make_run, capsys):
    folder = make_run("1", ["seed=a|b*c"])
    assert main([str(folder), str(make_run("2", ["seed=2"])), "--markdown", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].count("|") == lines[0].count("|")
    assert any(r"seed=a\|b\*c" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{sweep}/none"], "is not there"),
        (["{empty}"], "no runs"),
        (["{sweep}", "--csv", "{empty}"], "cannot write"),
        (["{sweep}", "--html", "{empty}/a", "--markdown", "{empty}/a"], "--html and --markdown both go to"),
    ],
)
def test_what_cannot_be_done_says_why(sweep, tmp_path, capsys, arguments, message):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([word.format(sweep=sweep, empty=empty) for word in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out
    assert not list(empty.iterdir())


def test_page_without_plotly_says_how_to_get_it(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([str(sweep), "--html", str(tmp_path / "a.html")]) == 2
    assert "pip install 'cbexp[report]'" in capsys.readouterr().err


# In a process of its own


def test_no_report_needs_torch_and_a_reader_may_go_away(make_run, tmp_path):
    folder = make_run("1")
    script = (
        "import sys; from cbexp.report.command_line import main; assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'transformers', 'hydra', 'omegaconf', 'wandb'} & set(sys.modules)"
    )
    files = {name: tmp_path / name for name in ("html", "csv", "json", "markdown")}
    command = [sys.executable, "-c", script, folder, *(f"--{name}={path}" for name, path in files.items())]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"completed" in done.stdout
    assert all("completed" in path.read_text(encoding="utf-8") for path in files.values())

    command = [sys.executable, "-m", "cbexp.report", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=600) == 0
