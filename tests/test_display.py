"""What is printed: content, units, width, and silence where there is no terminal."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from cbexp import metrics
from cbexp.artifacts import RunDirectory
from cbexp.config import ArtifactsConfig
from cbexp.display import ProgressDisplay
from cbexp.display.progress import REFRESH_INTERVAL_S
from cbexp.display.units import format_bytes, format_number, format_seconds, format_share
from cbexp.engine.types import StepInfo
from cbexp.metrics import MemoryUse, RequestRecord, RoundRecord
from tests.metrics_fixtures import describe_run

ADAPTER = "random LoRA of rank 16 on q_proj, k_proj, v_proj, o_proj"
DESCRIPTION = describe_run(name="a-sweep-with-a-long-name", lora_adapter=ADAPTER, max_new_tokens=12)
STATS = {"graphs": 9, "replays": 1234, "skipped_cudagraphs": 2, "compile_s": 12.5, "capture_s": 0.75}
STATS |= {"recompiles": 0, "graph_breaks": 0, "device_idle_share": 0.034}
RESCORED = {"num_completions": 3, "num_tokens": 24}
GREEDY = RESCORED | {"max_lag": 0.19, "mean_lag": 0.0043, "not_best_share": 0.1}
SAMPLED = RESCORED | {"kl": 1.2e-4, "max_logprob_difference": 0.04, "beyond_cap_share": 0.5}
ROOFLINE = {"roofline_fraction": 0.71, "bandwidth_bytes_per_s": 4.3e12}


def requests_of(round_index: int, *reasons: str) -> list[RequestRecord]:
    return [
        RequestRecord(round_index, f"r{i}", reason, 30, 12, 12, 0.001, 0.01, 0.002, 0.032, i == 0, "d", None)
        for i, reason in enumerate(reasons)
    ]


def round_of(requests: list[RequestRecord], wall_s: float = 0.5, is_warmup: bool = False) -> RoundRecord:
    steps = [
        StepInfo("prefill", 1, 2, 60, 0, None, 0.0, 0.1, 0, 0, 0.1),
        StepInfo("decode", 10, 2, 20, 5, 4, 0.1, 0.4, 0, 2, 0.25),
    ]
    memory = MemoryUse(10.0, 11.0, 12.5, 13.25, 2.0)
    return metrics.summarize_round(requests[0].round_index, is_warmup, 0.0, wall_s, requests, steps, memory)


def summary_of(*reasons: str) -> dict:
    """Of two timed rounds after one of warmup, each with requests that end for these reasons."""
    requests = [requests_of(index, *reasons) for index in range(3)]
    rounds = [round_of(own, wall_s=0.5 + i / 10, is_warmup=i == 0) for i, own in enumerate(requests)]
    durations_s = {"load_model": 12.3, "warmup": 0.045}
    warnings = ["cache.page_size is idle [here]"]
    flat = [request for own in requests for request in own]
    return metrics.summarize_run(DESCRIPTION, rounds, flat, durations_s, None, warnings, {})


class Screen:
    """A display on two consoles that are files."""

    def __init__(self, is_terminal: bool = False, width: int = 100) -> None:
        self.out, self.errors = io.StringIO(), io.StringIO()
        options = {"force_terminal": is_terminal, "width": width, "highlight": False}
        self.display = ProgressDisplay(*(Console(file=file, **options) for file in (self.out, self.errors)))

    @property
    def text(self) -> str:
        return self.out.getvalue()


@pytest.fixture
def directory(tmp_path, monkeypatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return RunDirectory.create(tmp_path / "outputs" / "default" / "2026-11-30_06-00-00", ArtifactsConfig())


def print_completed(summary: dict, directory: RunDirectory, **options) -> str:
    screen = Screen(**options)
    screen.display.print_outcome("completed", summary, None, directory)
    return screen.text


# Units


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (format_number, 9.996, "10.0"),
        (format_seconds, 0.0000123, "12.3 us"),
        (format_seconds, 0.00123, "1.23 ms"),
        (format_share, -1e-18, "0.0 %"),
        (format_bytes, 2**40, "1,024 GiB"),
    ],
)
def test_figures_have_three_digits_and_a_fitting_unit(form, value, text):
    assert form(value) == text


# The final table

FINAL_TABLE = """
a-sweep-with-a-long-name: tiny + random LoRA of rank 16 on q_proj, k_proj, v_proj, o_proj,
arithmetic, driver sync, compile eager, attention paged|sdpa, float32 on cpu
status       completed, 2 timed round(s) after 1 of warmup, all 4 requests finished
throughput   36.9 output tokens/s (34.3 to 40.0, +/- 7.7 %)
             129 tokens/s with prompts, 3.08 requests/s
wall         650 ms a round (600 ms to 700 ms)
tokens       24 output tokens a round, 12.0 a request (at most 12 of 12); ended by EOS 2, by limit 2
accuracy     50.0 % (2 of 4 judged completions)
rounds       identical completions in every timed round
time         prefill 15.5 %, mixed 0.0 %, decode 46.4 %, outside steps 38.1 %; decode at 71.0 % of
             the memory limit (4.30 TB/s)
batch        mean 2.00 requests a step, occupancy 100.0 %, padding 5.9 %, cache use up to 25.0 %
bursts       1 a round, each 10.0 steps and 20.0 tokens; device idle 3.4 %
compiled     in 12.5 s, 9 graphs captured in 750 ms; 2 skipped cudagraphs; 1,234 replays
memory       device peak 12.5 GiB allocated, 13.2 GiB reserved; process peak 2.00 GiB
durations    load model 12.3 s, warmup 45.0 ms

 times            mean       p50       p90       p99       max
 ─────────────────────────────────────────────────────────────
 TTFT          10.0 ms   10.0 ms   10.0 ms   10.0 ms   10.0 ms
 TPOT          2.00 ms   2.00 ms   2.00 ms   2.00 ms   2.00 ms
 latency       32.0 ms   32.0 ms   32.0 ms   32.0 ms   32.0 ms
 queue         1.00 ms   1.00 ms   1.00 ms   1.00 ms   1.00 ms
 decode step   30.0 ms   30.0 ms   30.0 ms   30.0 ms

warning      cache.page_size is idle [here]
tracking     W&B offline; upload with: wandb sync
             {path}
results      outputs/default/2026-11-30_06-00-00 (1.00 MiB)
"""


def test_final_table_has_every_figure_with_its_unit(directory):
    (directory.path / "more").write_bytes(b"x" * 2**20)
    path = f"/data/{'deep/' * 30}offline-run"  # is not broken
    tracking = {"tracking": f"W&B offline; upload with: wandb sync {path}"}
    text = print_completed(summary_of("eos", "length") | STATS | ROOFLINE | tracking, directory)
    assert [line.rstrip() for line in text.splitlines()] == FINAL_TABLE.format(path=path).splitlines()


FIXED = {"is_fixed_length": True}
GROUPS = {"verdict_mean": 0.5, "verdict_std": 0.4, "all_right_share": 0.25, "all_wrong_share": 0.0}
GROUPS = {"groups": GROUPS | {"num_groups": 4, "pass_at_1": 0.5, "pass_at_k": 0.75, "k": 8}}
DIFFERING = {"are_rounds_identical": False, "num_differing_requests": 1}


@pytest.mark.parametrize(
    ("reasons", "changes", "expected"),
    [
        ("length length", FIXED, "24 output tokens a round, fixed length 12"),
        ("length", FIXED | {"num_short": 4}, "4 request(s) SHORT of the fixed length 12"),
        ("eos eos", DIFFERING, "NOT identical: the completions of 1 of 2 requests differ between timed"),
        (
            "eos eos",
            {"rescoring": GREEDY | {"note": None}},
            "3 completions, 24 tokens, by the model's own forward; at",
        ),
        (
            "eos eos",
            {"rescoring": GREEDY | {"note": None}},
            "at most 0.19 nats below its best token (mean 0.0043)",
        ),
        ("eos eos", {"rescoring": SAMPLED | {"note": "why"}}, "of sequences beyond a ratio of 3; why"),
        (
            "eos eos",
            {"rescoring": SAMPLED | {"note": None}},
            "KL 0.00012, log-probabilities up to 0.04 apart, 50.0 %",
        ),
        ("eos eos", {"rescoring": {"num_completions": 0, "note": "why"}}, "rescored nothing: why"),
        ("eos stop stop length", {}, "ended by EOS 2, by stop 4, by limit 2"),
        ("eos", {"sampling": {"temperature": 0.7, "logprobs": True}}, "temperature=0.7, logprobs=True"),
        (
            "eos",
            GROUPS,
            "pass@1 50.0 %, pass@8 75.0 %, all right 25.0 %, all wrong 0.0 %; verdicts 0.50 +/- 0.40",
        ),
        ("eos failed lost", {}, "but 2 FAILED and 2 LOST of 6 requests"),
    ],
)
def test_what_other_runs_have_is_in_the_table(directory, reasons, changes, expected):
    text = print_completed(summary_of(*reasons.split()) | changes, directory)
    assert expected in " ".join(text.split())


def test_table_fits_a_narrow_terminal_with_failures_in_red(directory):
    summary = summary_of("eos", "failed") | STATS | {"warnings": ["a warning of many words " * 20]}
    text = print_completed(summary, directory, is_terminal=True, width=60)
    (failures,) = [line for line in text.splitlines() if "FAILED" in line]
    assert "\x1b[1;31m" in failures
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 60
    assert "\x1b" not in print_completed(summary, directory)


def test_driver_without_steps_and_device_has_a_table_too(directory):
    requests = requests_of(0, "failed")
    record = metrics.summarize_round(0, False, 0.0, 1.0, requests, [], MemoryUse(None, None, None, None, 0.5))
    summary = metrics.summarize_run(DESCRIPTION, [record], requests, {}, None, [], {})
    text = print_completed(summary, directory)
    assert "process peak 0.50 GiB" in text
    assert not any(word in text for word in ("decode step", "prefill", "identical", "compiled"))


# Other ends


@pytest.mark.parametrize(
    ("status", "word"), [("out_of_memory", "OUT OF MEMORY"), ("not_applicable", "NOT APPLICABLE")]
)
def test_bad_ends_go_to_stderr_with_reason_and_records(directory, status, word):
    directory.mark(status, ValueError("x"))
    screen = Screen()
    screen.display.print_outcome(status, None, "the reason [/bold] in brackets\nand more", directory)
    assert screen.text == ""
    first, second, records, *traceback = screen.errors.getvalue().splitlines()
    assert (first, second) == (f"{word}: the reason [/bold] in brackets", "and more")
    folder = "outputs/default/2026-11-30_06-00-00"
    assert records.startswith(f"records      {folder} (")
    assert traceback == ([] if "NOT" in word else [f"traceback    {folder}/traceback.txt"])


# Before and during rounds

MODEL = {"model_type": "qwen3", "num_parameters": 1_000_000, "weight_bytes": 4_000_000}
DRIVER = {"driver": "sync", "device": "cpu", "dtype": "float32", "attn_implementation": "sdpa"}
BATCHES = {"max_new_tokens": 64, "max_requests_per_batch": 32, "page_size": 256, "max_batch_tokens": 8192}
DECODING = {"batch_shape": "buckets", "buckets": [1, 8, 32], "max_burst": 128, "fusion": "auto"}
PLAN = MODEL | DRIVER | BATCHES | {"block_sharing": False, "scheduler": "fifo"}
PLAN |= DECODING | {"compile_mode": "eager", "self_check": True}
SET_UP = """\
model        qwen3, 1,000,000 parameters, 3.81 MiB of weights, float32 on cpu
driver       sync, compile eager, attention sdpa
batches      at most 64 new tokens a request, 32 requests a step, 8,192 tokens a step; block sharing
             off, scheduler fifo
decoding     buckets 1, 8, 32, bursts of up to 128 steps, fusion auto
warning      adapter.rank is idle
stop         EOS ids 1, 2; pad id 0
cache        32,768 tokens: 128 blocks of 256
resolved     fusion layers, batches 1, 8
defaults     the model's own do_sample=True, temperature=0.6 do not apply
compiled     in 12.5 s, 9 graphs captured in 750 ms; 2 skipped cudagraphs
compiler     cache of 3.00 MiB in /cache/inductor, /cache/triton
weights      8.04 GB
"""


def test_plan_stop_ids_cache_and_compilation_are_printed():
    screen = Screen()
    display = screen.display
    display.print_plan(SimpleNamespace(to_dict=lambda: PLAN, warnings=["adapter.rank is idle"]))
    display.print_stop_ids((1, 2), 0)
    cache = {"num_blocks": 128, "page_size": 256, "fusion": "layers", "buckets": [1, 8]}
    unused = {"do_sample": True, "temperature": 0.6}
    display.print_cache(cache | {"unused_model_defaults": unused})
    folders = ["/cache/inductor", "/cache/triton"]
    display.print_set_up(STATS, {"folders": folders, "num_bytes": 3 * 2**20})
    display.print_dry_run(SimpleNamespace(rows=lambda: [("weights", "8.04 GB")]))
    assert screen.text == SET_UP


def decode_step(end_s: float, num_finished: int = 0) -> StepInfo:
    return StepInfo("decode", 1, 2, 2, 0, None, end_s, end_s, 0, num_finished, 0.125)


def test_without_a_terminal_a_round_is_one_line(monkeypatch):
    screen = Screen()
    with screen.display.showing_round(3, False, 2):
        screen.display.on_step(0, decode_step(time.perf_counter() + 9))
    assert screen.text == ""
    monkeypatch.setattr("cbexp.display.progress.NOTEWORTHY_PHASE_S", 0.0)
    with screen.display.showing_phase("load_model"):
        pass
    screen.display.print_round(round_of(requests_of(3, "eos", "length")))
    screen.display.print_round(round_of(requests_of(0, "eos", "lost"), is_warmup=True))
    phase, *rounds = screen.text.splitlines()
    assert phase.startswith("load model   ")
    assert rounds == [
        "round 3      500 ms, 48.0 output tokens/s, 24 tokens, 2 of 2 requests, accuracy 50.0 %",
        "warmup 0     500 ms, 24.0 output tokens/s, 12 tokens, 1 of 2 requests, accuracy 50.0 %, 0 FAILED, 1",
        "             LOST",
    ]


def test_terminal_shows_requests_tokens_and_cache_while_a_round_runs(monkeypatch):
    start_s = 100.0
    monkeypatch.setattr("cbexp.display.progress.time.perf_counter", lambda: start_s)
    screen = Screen(is_terminal=True)
    with pytest.raises(KeyboardInterrupt), screen.display.showing_round(1, False, 32):
        assert "round 1: 32 requests are running" in screen.text
        screen.display.on_step(0, StepInfo("prefill", 1, 32, 900, 0, None, start_s, start_s + 1.0, 0, 1, 0.5))
        screen.display.on_step(1, decode_step(start_s + 2.0, num_finished=2))
        raise KeyboardInterrupt
    assert "round 1: 1 of 32 requests done, about 32.0 output tokens/s, cache 50.0 %, 1.00 s" in screen.text
    assert "round 1: 3 of 32 requests done, about 17.0 output tokens/s, cache 12.5 %, 2.00 s" in screen.text
    screen.display.on_step(2, decode_step(start_s + 9.0))
    assert screen.text.endswith("\x1b[1A\x1b[2K"), "the line must be gone at the end"


def test_refreshes_are_rare():
    screen = Screen(is_terminal=True)
    with screen.display.showing_round(1, False, 32):
        start_s = time.perf_counter()
        for index in range(2_000):
            screen.display.on_step(index, decode_step(start_s + index / 100))
    expected = 20 / REFRESH_INTERVAL_S
    assert 0.5 * expected < screen.text.count("requests done") <= expected + 2


@pytest.mark.parametrize("columns", [None, "300"])
def test_width_is_100_columns_at_most_and_where_it_is_unknown(monkeypatch, capsys, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    ProgressDisplay().print_line("word " * 60)
    assert 90 <= max(map(len, capsys.readouterr().out.splitlines())) <= 100
