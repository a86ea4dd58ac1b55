"""The final table: what a run measured, from the content of its summary.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cbexp.display.layout import print_line, print_row
from cbexp.display.settings import describe_compilation, has_compiled
from cbexp.display.units import (
    format_bytes,
    format_number,
    format_path,
    format_seconds,
    format_share,
    format_spread,
)

Summary = Mapping[str, Any]

TIMES = {
    "TTFT": "ttft_s",
    "TPOT": "tpot_s",
    "latency": "latency_s",
    "queue": "queue_s",
    "decode step": "decode_step_s",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")
LOUD, GOOD, QUIET = "bold red", "green", "dim"


def print_summary(console: Console, summary: Summary, run_dir: Path, size_bytes: int) -> None:
    """Print the summary of a completed run, and where its records are."""
    print_line(console, f"\n{_title(summary)}", "bold")
    for label, text, style in _rows(summary):
        print_row(console, label, text, style)
    console.print(_times(summary), width=console.width)
    for warning in summary["warnings"]:
        print_row(console, "warning", warning, "yellow")
    if "tracking" in summary:
        print_row(console, "tracking", summary["tracking"])
    print_row(console, "results", f"{format_path(run_dir)} ({format_bytes(size_bytes)})")


def _title(summary: Summary) -> str:
    adapter = f" + {summary['lora_adapter']}" if summary["lora_adapter"] else ""
    return (
        f"{summary['name']}: {summary['model']}{adapter}, {summary['dataset']}, driver {summary['backend']}, "
        f"compile {summary['compile_mode']}, attention {summary['attn_impl']}, "
        f"{summary['dtype']} on {summary['device']}"
    )


def _rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Label, text and style of each line above the table of times."""
    yield _status(summary)
    yield "throughput", _throughput(summary), "bold"
    yield "", _other_rates(summary), ""
    yield "wall", f"{format_seconds(summary['median_wall_s'])} a round ({_wall_range(summary)})", ""
    yield _tokens(summary)
    if summary["sampling"]:
        yield "sampling", ", ".join(f"{name}={value}" for name, value in summary["sampling"].items()), ""
    if summary["num_judged"]:
        judged = f"{summary['num_correct']} of {summary['num_judged']} judged completions"
        yield "accuracy", f"{format_share(summary['accuracy'])} ({judged})", GOOD
    if summary["groups"] is not None:
        yield "groups", _groups(summary["groups"]), ""
    if summary["are_rounds_identical"] is not None:
        yield _identity(summary)
    if summary["rescoring"] is not None:
        yield _rescoring(summary["rescoring"])
    if summary["decode_share"] is not None:
        yield "time", _shares(summary), ""
        yield "batch", _batch(summary), ""
        if summary["num_bursts"]:
            yield "bursts", _bursts(summary), ""
    if has_compiled(summary):
        yield _compilation(summary)
    yield "memory", _memory(summary), ""
    yield "durations", _durations(summary), QUIET


def _status(summary: Summary) -> tuple[str, str, str]:
    num_bad = summary["num_failed"] + summary["num_lost"]
    rounds = f"{summary['num_rounds']} timed round(s) after {summary['num_warmup_rounds']} of warmup"
    if num_bad:
        bad = f"{summary['num_failed']} FAILED and {summary['num_lost']} LOST of {summary['num_requests']} requests"
        return "status", f"{summary['status']}, but {bad}; {rounds}", LOUD
    return "status", f"{summary['status']}, {rounds}, all {summary['num_requests']} requests finished", GOOD


def _throughput(summary: Summary) -> str:
    return f"{format_number(summary['decode_tps'])} output tokens/s ({format_spread(summary['output_tokens_per_s'])})"


def _other_rates(summary: Summary) -> str:
    total, requests = summary["total_tokens_per_s"]["median"], summary["requests_per_s"]["median"]
    return f"{format_number(total)} tokens/s with prompts, {format_number(requests)} requests/s"


def _wall_range(summary: Summary) -> str:
    wall = summary["wall_s"]
    return f"{format_seconds(wall['min'])} to {format_seconds(wall['max'])}"


def _tokens(summary: Summary) -> tuple[str, str, str]:
    text = f"{summary['n_decoded_tokens']:,} output tokens a round"
    limit = summary["max_new_tokens"]
    if summary["is_fixed_length"]:
        fixed = f"lengths of up to {limit:,}" if summary["has_limits_per_prompt"] else f"length {limit:,}"
        if summary["num_short"]:
            return "tokens", f"{text}; {summary['num_short']} request(s) SHORT of the fixed {fixed}", LOUD
        return "tokens", f"{text}, fixed {fixed}", ""
    reasons, lengths = summary["finish_reasons"], summary["completion_tokens"]
    if lengths is not None:
        text += f", {format_number(lengths['mean'])} a request (at most {lengths['max']:,.0f} of {limit:,})"
    stops = f", by stop {reasons['stop']:,}" if reasons["stop"] else ""
    return "tokens", f"{text}; ended by EOS {reasons['eos']:,}{stops}, by limit {reasons['length']:,}", ""


def _groups(groups: Mapping[str, Any]) -> str:
    shares = {
        "pass@1": "pass_at_1",
        f"pass@{groups['k']}": "pass_at_k",
        "all right": "all_right_share",
        "all wrong": "all_wrong_share",
    }
    text = ", ".join(f"{label} {format_share(groups[name])}" for label, name in shares.items())
    return (
        f"{text}; verdicts {format_number(groups['verdict_mean'])} +/- {format_number(groups['verdict_std'])}"
    )


def _identity(summary: Summary) -> tuple[str, str, str]:
    if summary["are_rounds_identical"]:
        return "rounds", "identical completions in every timed round", GOOD
    num_requests = summary["num_prompts"] * summary["num_generations"]
    differing = f"{summary['num_differing_requests']} of {num_requests} requests"
    return "rounds", f"NOT identical: the completions of {differing} differ between timed rounds", "yellow"


def _rescoring(rescoring: Summary) -> tuple[str, str, str]:
    num_completions, note = rescoring["num_completions"], rescoring["note"]
    if num_completions == 0:
        return "rescored", f"nothing: {note}", "yellow"
    parts = [
        f"{num_completions:,} completions, {rescoring['num_tokens']:,} tokens, by the model's own forward"
    ]
    if "max_lag" in rescoring:
        parts.append(
            f"at most {rescoring['max_lag']:.2g} nats below its best token (mean {rescoring['mean_lag']:.2g})"
        )
    if "kl" in rescoring:
        beyond = format_share(rescoring["beyond_cap_share"])
        parts.append(
            f"KL {rescoring['kl']:.2g}, log-probabilities up to {rescoring['max_logprob_difference']:.2g} "
            f"apart, {beyond} of sequences beyond a ratio of 3"
        )
    return "rescored", "; ".join(parts + ([note] if note else [])), "yellow" if note else GOOD


def _shares(summary: Summary) -> str:
    kinds = {"prefill": "prefill", "mixed": "mixed", "decode": "decode", "outside steps": "outside_steps"}
    text = ", ".join(f"{label} {format_share(summary[f'{key}_share'])}" for label, key in kinds.items())
    if summary["roofline_fraction"] is not None:
        bandwidth = format_number(summary["bandwidth_bytes_per_s"] / 1e12)
        text += (
            f"; decode at {format_share(summary['roofline_fraction'])} of the memory limit ({bandwidth} TB/s)"
        )
    return text


def _batch(summary: Summary) -> str:
    text = f"mean {format_number(summary['mean_batch'])} requests a step"
    text += (
        f", occupancy {format_share(summary['occupancy'])}, padding {format_share(summary['padding_share'])}"
    )
    if summary["peak_cache_used"]:
        text += f", cache use up to {format_share(summary['peak_cache_used'])}"
    return text


def _bursts(summary: Summary) -> str:
    text = (
        f"{summary['num_bursts']:,.0f} a round, each {format_number(summary['steps_per_burst'])} steps and "
    )
    text += f"{format_number(summary['tokens_per_burst'])} tokens"
    if summary["device_idle_share"] is not None:
        text += f"; device idle {format_share(summary['device_idle_share'])}"
    return text


def _compilation(summary: Summary) -> tuple[str, str, str]:
    troubles = ("recompiles", "graph_breaks", "skipped_cudagraphs")
    style = "yellow" if any(summary[key] for key in troubles) else QUIET
    replays = f"; {summary['replays']:,} replays" if summary["replays"] else ""
    return "compiled", f"{describe_compilation(summary)}{replays}", style


def _memory(summary: Summary) -> str:
    host = (
        f"process peak {format_number(summary['peak_host_gib'])} GiB"
        if summary["peak_host_gib"]
        else "not measured"
    )
    if summary["peak_reserved_gib"] is None:
        return host
    if summary["peak_allocated_gib"] is None:
        return f"device peak {format_number(summary['peak_reserved_gib'])} GiB reserved; {host}"
    allocated, reserved = (format_number(summary[f"peak_{kind}_gib"]) for kind in ("allocated", "reserved"))
    return f"device peak {allocated} GiB allocated, {reserved} GiB reserved; {host}"


def _durations(summary: Summary) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {format_seconds(seconds)}"
        for name, seconds in summary["durations_s"].items()
    )


def _times(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("times")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for label, key in TIMES.items():
        times = summary[key]
        if times is not None:
            table.add_row(label, *(format_seconds(times[c]) if c in times else "" for c in COLUMNS))
    return table
