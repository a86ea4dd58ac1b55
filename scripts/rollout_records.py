"""From a system's finished rounds to its record, and from the records of like work to their table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_workloads import UnlikeWorkError, Workload

BASELINE = "vllm"
TABLE_NAME = "table.md"
HEADER = (
    "| workload | system | compile | output tokens/s (median) | range | times vLLM | set-up | peak memory |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
SUMMARY_KEYS = ("compile_mode", "attn_impl", "dtype", "peak_memory_gb", "roofline_fraction", "durations_s")
LOADING = ("load_tokenizer", "load_prompts", "total")


def build_record(
    workload: Workload, system: str, wall_times_s: Sequence[float], facts: dict[str, Any]
) -> dict[str, Any]:
    """What is kept of a system on a workload; rates are over whole rounds, prefill included."""
    rates = [workload.num_output_tokens / wall_s for wall_s in wall_times_s]
    return {
        "workload": workload.name,
        "system": system,
        "work": {
            "digest": workload.digest,
            "num_requests": len(workload.prompt_ids),
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
            "max_requests_per_batch": workload.max_requests_per_batch,
        },
        "wall_times_s": list(wall_times_s),
        "output_tokens_per_s": {
            "median": workload.num_output_tokens / statistics.median(wall_times_s),
            "min": min(rates),
            "max": max(rates),
        },
        **facts,
    }


def read_cbexp_run(folder: Path, workload: Workload, system: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The record of a completed job, whose prompts and completions must be the workload's.

    Raises:
        UnlikeWorkError: they are not.
    """
    summary, environment, engine = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "environment", "engine")
    )
    for index, rows in enumerate(_read_rounds(folder)):
        if [row["prompt_ids"] for row in rows] != workload.prompt_ids:
            raise UnlikeWorkError(
                f"{system}, {workload.name}, round {index}: other prompts than the others get"
            )
        workload.check_lengths(system, [[len(row["completion_ids"]) for row in rows]])
    durations_s = summary["durations_s"]
    cuda = environment["cuda"]
    facts = {
        "overrides": list(overrides),
        "set_up_s": sum(value for name, value in durations_s.items() if name not in LOADING),
        "gpu": None if cuda is None else cuda["devices"][0]["name"],
        "versions": environment["versions"],
        "source": environment["source"],
        "settings": engine,
    }
    return build_record(
        workload, system, summary["wall_times_s"], {key: summary[key] for key in SUMMARY_KEYS} | facts
    )


def write_table(into: Path) -> str:
    """Write and return the table of all records below `into`.

    Raises:
        UnlikeWorkError: two records of one workload are of different work.
    """
    records = [json.loads(path.read_text()) for path in sorted(into.glob("*/*.json"))]
    by_workload: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_workload.setdefault(record["workload"], []).append(record)
    table = HEADER + "".join(row for group in by_workload.values() for row in _describe_group(group))
    into.mkdir(parents=True, exist_ok=True)
    (into / TABLE_NAME).write_text(table)
    return table


def _describe_group(records: list[dict[str, Any]]) -> Iterator[str]:
    if len({record["work"]["digest"] for record in records}) > 1:
        work = "; ".join(f"{r['system']}: {r['work']['num_output_tokens']} tokens" for r in records)
        raise UnlikeWorkError(
            f"the records of {records[0]['workload']} are of different work ({work}): no table"
        )
    base = next((_median_rate(record) for record in records if record["system"] == BASELINE), None)
    for record in sorted(records, key=_median_rate, reverse=True):
        rate, memory = record["output_tokens_per_s"], record.get("peak_memory_gb")
        cells = (
            record["workload"],
            record["system"],
            record.get("compile_mode", "its default"),
            f"{rate['median']:,.0f}",
            f"{rate['min']:,.0f} to {rate['max']:,.0f}",
            "-" if base is None else f"{rate['median'] / base:.2f}",
            f"{record['set_up_s']:.0f} s",
            "-" if memory is None else f"{memory:.1f} GB",
        )
        yield f"| {' | '.join(cells)} |\n"


def _median_rate(record: dict[str, Any]) -> float:
    return float(record["output_tokens_per_s"]["median"])


def _read_rounds(folder: Path) -> list[list[dict[str, Any]]]:
    """Completions of each round, warmup included, in the order of submission."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    with (folder / "completions.jsonl").open() as file:
        for line in file:
            row = json.loads(line)
            rounds.setdefault(row["round_index"], []).append(row)
    return list(rounds.values())
