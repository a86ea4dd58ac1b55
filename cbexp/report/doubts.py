"""Reasons to doubt a run's figures, or that it can be repeated, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cbexp.report.answers import find_most_accurate, is_less_accurate
from cbexp.report.json_files import lookup, number, strings
from cbexp.report.run import Run

MAX_MEMORY_IN_USE_MIB = 1024  # a CUDA context or two; more is in use by others
MAX_HALF_RANGE = 0.05


def find_doubts(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Each sentence with the runs that it is true of."""
    doubts: dict[str, list[Run]] = {}
    for run in runs:
        for doubt in [*_doubts_of_figures(run), *_doubts_of_environment(run), *run.remarks]:
            doubts.setdefault(doubt, []).append(run)
    if wrong := _find_wrong_more_often(runs):
        doubts["fewer correct completions than another run of the same workload, beyond chance"] = wrong
    return doubts


def _find_wrong_more_often(runs: Sequence[Run]) -> list[Run]:
    """Runs that answer correctly less often than the most accurate run of their workload, beyond chance."""
    workloads: dict[str, list[Run]] = {}
    for run in runs:
        if run.workload_hash is not None:
            workloads.setdefault(run.workload_hash, []).append(run)
    best = {key: find_most_accurate(some) for key, some in workloads.items()}
    return [
        run
        for run in runs
        if (other := best.get(run.workload_hash or "")) is not None and is_less_accurate(run, other)
    ]


def _doubts_of_figures(run: Run) -> Iterator[str]:
    if not run.is_completed:
        return
    half_range = run.figure("output_tokens_per_s", "relative_half_range")
    if half_range is not None and half_range > MAX_HALF_RANGE:
        yield f"throughput varies by more than ±{MAX_HALF_RANGE:.0%} between rounds"
    if run.fact("are_rounds_identical") is False:
        yield "completions differ between timed rounds of the same prompts"
    if run.figure("num_short"):
        yield "some requests ended below the fixed length"
    if run.fact("is_fixed_length") is True and run.figure("num_judged"):
        yield "answers were judged although sampling.ignore_eos=true wrote on past their ends: accuracy means little"
    if run.figure("rescoring", "num_completions") == 0:
        yield f"no completion was rescored: {run.fact('rescoring', 'note')}"
    yield from strings(run.summary, "warnings")


def _doubts_of_environment(run: Run) -> Iterator[str]:
    if lookup(run.environment, "source", "is_dirty") is True:
        yield "uncommitted changes: the commit does not say what ran"
    if num_others := num_other_gpu_processes(run):
        yield f"{num_others} other process(es) on the GPU when the run started"
    in_use_mib = max((number(gpu, "memory_used_mib") or 0 for gpu in run.gpu_states), default=0)
    if in_use_mib > MAX_MEMORY_IN_USE_MIB:
        yield f"GPU memory in use when the run started: {in_use_mib / 1024:.0f} GiB"


def num_other_gpu_processes(run: Run) -> int:
    """Processes on the run's GPUs at its start that are not its own."""
    processes = lookup(run.environment, "cuda", "processes")
    found = (
        [process for process in processes if isinstance(process, Mapping)]
        if isinstance(processes, list)
        else []
    )
    own = number(run.status_record, "pid")
    return sum(number(process, "pid") not in (None, own) for process in found)
