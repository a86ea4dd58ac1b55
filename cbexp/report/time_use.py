"""A job's time by phase, in seconds that add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping

from cbexp.report.json_files import lookup, number
from cbexp.report.run import Run

SET_UP = ("prepare", "load", "compile", "capture", "warmup")
ROUND_SHARES: Mapping[str, str] = {
    "prefill": "prefill_share",
    "mixed": "mixed_share",
    "decode": "decode_share",
    "idle": "outside_steps_share",
}
UNKNOWN_ROUND, OTHER = "rounds", "other"
PHASES = (*SET_UP, *ROUND_SHARES, UNKNOWN_ROUND, OTHER)
MEANINGS: Mapping[str, str] = {
    "prepare": "recording the environment, planning, starting W&B, building the driver",
    "load": "tokenizer, prompts, weights, and measuring the memory bandwidth",
    "compile": "torch.compile",
    "capture": "CUDA graphs",
    "warmup": "warmup rounds and what else comes before the first timed round",
    "prefill": "steps that read prompts",
    "mixed": "steps that read prompts and decode",
    "decode": "steps that add a token to each request",
    "idle": "time of the timed rounds outside of any step: the driver itself, and waiting",
    UNKNOWN_ROUND: "timed rounds of a driver that records no steps",
    OTHER: "judging, rescoring, tracking and writing down, in no figure",
}


def seconds_by_phase(run: Run) -> dict[str, float]:
    """Seconds of a completed job in each of `PHASES` that took any; empty without records of them."""
    total_s = run.figure("durations_s", "total")
    if not run.is_completed or total_s is None:
        return {}
    phases = {**_set_up(run), **_timed_rounds(run)}
    phases[OTHER] = total_s - sum(phases.values())
    return {name: phases[name] for name in PHASES if phases.get(name, 0.0) > 0}


def shares_of_round(run: Run) -> dict[str, float]:
    """Share of each phase in the timed rounds, adding up to 1; empty for a driver that records no steps."""
    if not run.is_completed:
        return {}
    shares = {phase: run.figure(name) for phase, name in ROUND_SHARES.items()}
    return {phase: share for phase, share in shares.items() if share is not None and share > 0}


def _set_up(run: Run) -> dict[str, float]:
    durations = lookup(run.summary, "durations_s")
    named = durations if isinstance(durations, Mapping) else {}
    load_s = sum(
        number(named, name) or 0.0
        for name in named
        if name.startswith("load_") or name == "measure_bandwidth"
    )
    prepare_s = sum(number(named, name) or 0.0 for name in ("prepare", "build_driver"))
    compile_s, capture_s = run.figure("compile_s") or 0.0, run.figure("capture_s") or 0.0
    before_s = sum(number(named, name) or 0.0 for name in ("driver_warmup", "warmup")) + run.warmup_rounds_s
    return {
        "prepare": prepare_s,
        "load": load_s,
        "compile": compile_s,
        "capture": capture_s,
        "warmup": max(before_s - compile_s - capture_s, 0.0),
    }


def _timed_rounds(run: Run) -> dict[str, float]:
    rounds_s = sum(timed.wall_s for timed in run.rounds)
    shares = shares_of_round(run) or {UNKNOWN_ROUND: 1.0}
    return {phase: share * rounds_s for phase, share in shares.items()}
