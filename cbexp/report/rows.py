"""Each run as one flat row of plain values, for the tables, the files and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbexp.report.answers import same_completions_share
from cbexp.report.baseline import OTHER_WORKLOAD, choose_baselines, ratio_of
from cbexp.report.labels import label_runs, label_within
from cbexp.report.run import Run
from cbexp.report.workload_order import order_workloads

FIGURES: Mapping[str, tuple[str, ...]] = {
    "output_tokens_per_s": ("output_tokens_per_s", "median"),
    "output_tokens_per_s_min": ("output_tokens_per_s", "min"),
    "output_tokens_per_s_max": ("output_tokens_per_s", "max"),
    "relative_half_range": ("output_tokens_per_s", "relative_half_range"),
    "num_rounds": ("num_rounds",),
    "median_wall_s": ("median_wall_s",),
    "peak_allocated_gib": ("peak_allocated_gib",),
    "peak_reserved_gib": ("peak_reserved_gib",),
    "peak_host_gib": ("peak_host_gib",),
    "roofline_fraction": ("roofline_fraction",),
    "accuracy": ("accuracy",),
    "kl": ("rescoring", "kl"),
    "max_logprob_difference": ("rescoring", "max_logprob_difference"),
    "beyond_cap_share": ("rescoring", "beyond_cap_share"),
    "max_lag": ("rescoring", "max_lag"),
    "mean_lag": ("rescoring", "mean_lag"),
    **{
        name: ("groups", name)
        for name in (
            "verdict_mean",
            "verdict_std",
            "all_right_share",
            "all_wrong_share",
            "pass_at_1",
            "pass_at_k",
            "k",
        )
    },
    "mean_logprob_error": ("mean_logprob_error",),
    "max_logprob_error": ("max_logprob_error",),
    "mean_logit_error": ("mean_logit_error",),
    "max_logit_error": ("max_logit_error",),
    "ttft_s_p50": ("ttft_s", "p50"),
    "decode_step_s_p50": ("decode_step_s", "p50"),
    "decode_step_s_p99": ("decode_step_s", "p99"),
    "mean_batch": ("mean_batch",),
    "compile_s": ("compile_s",),
    "capture_s": ("capture_s",),
    "total_s": ("durations_s", "total"),
}
Row = dict[str, Any]
FACTS = ("model", "dataset", "backend", "device", "dtype", "compile_mode", "attn_impl", "lora_adapter")


def run_rows(runs: Sequence[Run], baseline: str | None = None) -> list[Row]:
    """A row for each run, grouped by workload in the order of `order_workloads`, the fastest of each first.

    Runs without a workload_hash follow. Runs without a throughput come last, in their given order.

    Keys of every row: label, label_in_work (the label within its workload, by `label_within`), status, message, the
    names of `FIGURES` (numbers or None; seconds, GiB, shares in [0, 1]), ratio with ratio_low and ratio_high (its
    interval), no_ratio (why there is none), is_baseline, same_completions_share (with the baseline), baseline (the
    label of the run that the ratio is to), are_rounds_identical, workload_hash, the names of `FACTS`, overrides (one
    string), command, folder.

    Raises:
        ReportError: `baseline` fits no run, or several.
    """
    labels, labels_in_workload = label_runs(runs), label_within(runs)
    baselines, order = choose_baselines(runs, baseline), order_workloads(runs)
    rows = [_row(run, labels, baselines) | {"label_in_work": labels_in_workload[run.folder]} for run in runs]
    _say_why_no_ratio(rows)
    places = {workload_hash: place for place, workload_hash in enumerate(order)}

    def place(row: Row) -> tuple[int, float]:
        rate = row["output_tokens_per_s"] or 0.0
        return (places.get(row["workload_hash"], len(order)) if rate else len(order) + 1, -rate)

    return sorted(rows, key=place)


def format_row_numbers(numbers: Sequence[int]) -> str:
    """Numbers of rows as text, neighbours joined: `#1, #3-5`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"#{low}" if low == high else f"#{low}-{high}" for low, high in spans)


def _say_why_no_ratio(rows: Sequence[Row]) -> None:
    """Set `no_ratio` of completed runs whose workload has no baseline, where several workloads ran."""
    completed = [row for row in rows if row["output_tokens_per_s"] is not None]
    has_several = len({row["workload_hash"] for row in completed}) > 1
    for row in rows:
        is_without = row["ratio"] is None and row["output_tokens_per_s"] is not None
        row["no_ratio"] = OTHER_WORKLOAD if has_several and is_without else None


def _row(run: Run, labels: Mapping[Path, str], baselines: Mapping[str, Run]) -> dict[str, Any]:
    return {
        "label": labels[run.folder],
        "status": run.status,
        "message": run.message,
        **dict(_figures(run)),
        **_ratio(run, labels, baselines),
        "are_rounds_identical": _plain(run.fact("are_rounds_identical")),
        "workload_hash": run.workload_hash,
        **{name: _plain(run.fact(name)) for name in FACTS},
        "overrides": " ".join(run.overrides),
        "command": run.command,
        "folder": str(run.folder),
    }


def _plain(fact: Any) -> bool | str | None:
    """A fact of a type that our summaries have; None for anything else."""
    return fact if isinstance(fact, bool | str) else None


def _figures(run: Run) -> Iterator[tuple[str, float | None]]:
    """The figures of a completed run; None for any other, whatever its summary says. One round has no range."""
    for name, path in FIGURES.items():
        is_known = run.is_completed and not (name == "relative_half_range" and run.figure("num_rounds") == 1)
        yield name, run.figure(*path) if is_known else None


def _ratio(run: Run, labels: Mapping[Path, str], baselines: Mapping[str, Run]) -> dict[str, Any]:
    ratio, base = ratio_of(run, baselines), baselines.get(run.workload_hash or "")
    interval = None if ratio is None else ratio.interval
    return {
        "ratio": None if ratio is None else ratio.value,
        "ratio_low": None if interval is None else interval.low,
        "ratio_high": None if interval is None else interval.high,
        "is_baseline": base is not None and base.folder == run.folder,
        "same_completions_share": None if base is None or base is run else same_completions_share(run, base),
        "baseline": None if ratio is None or base is None else labels[base.folder],
    }
