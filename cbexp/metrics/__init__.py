"""Pure functions and records that turn times and completions into numbers: request, step, round, run."""

from cbexp.metrics.description import RunDescription, workload_hash
from cbexp.metrics.groups import estimate_pass_at_k
from cbexp.metrics.quantiles import Quantiles, Spread, median, percentile, spread, spread_of_rate
from cbexp.metrics.records import (
    FINISHED_REASONS,
    LOST,
    MemoryUse,
    RequestRecord,
    RoundRecord,
    StepSummary,
    flatten_numbers,
)
from cbexp.metrics.requests import digest_completions, digest_ids, summarize_completions, summarize_requests
from cbexp.metrics.roofline import RooflineInputs, mean_decode_context, roofline_fraction
from cbexp.metrics.rounds import summarize_round
from cbexp.metrics.run import COMPILE_STATS, summarize_run
from cbexp.metrics.steps import step_rows, summarize_steps

__all__ = [
    "COMPILE_STATS",
    "FINISHED_REASONS",
    "LOST",
    "MemoryUse",
    "Quantiles",
    "RequestRecord",
    "RooflineInputs",
    "RoundRecord",
    "RunDescription",
    "Spread",
    "StepSummary",
    "digest_completions",
    "digest_ids",
    "estimate_pass_at_k",
    "flatten_numbers",
    "mean_decode_context",
    "median",
    "percentile",
    "roofline_fraction",
    "spread",
    "spread_of_rate",
    "step_rows",
    "summarize_completions",
    "summarize_requests",
    "summarize_round",
    "summarize_run",
    "summarize_steps",
    "workload_hash",
]
