"""What a run leaves on disk, made by hand, so that every figure in it is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cbexp.report import Run, load_runs
from cbexp.report.page_table import TIMES

REFERENCE = Path(__file__).parents[2] / "outputs/reference"
WORKLOAD, OTHER_WORKLOAD = "a" * 64, "b" * 64


def load_one(folder: Path) -> Run:
    (run,) = load_runs([folder])
    return run


def write_json(path: Path, values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def write_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of(page: str) -> str:
    """The page's text, without its markup."""
    return " ".join(re.sub(r"<[^>]+>", "", page).replace(TIMES, "x").split())


def round_record(index, wall_s, digest="d"):
    steps = {"mean_decode_batch": 4.0, "decode_step_s": {"min": 0.001, "p50": 0.002, "p99": 0.004}}
    record = {"round_index": index, "is_warmup": False, "wall_s": wall_s, "num_output_tokens": 100}
    return record | {"completions_digest": digest, "steps": steps}


def summary_of(walls_s, **more):
    rates = [100 / wall_s for wall_s in walls_s]
    middle = 100 / sorted(walls_s)[len(walls_s) // 2]
    spread = {"median": middle, "min": min(rates), "max": max(rates)}
    spread["relative_half_range"] = (max(rates) - min(rates)) / 2 / middle
    durations_s = {"prepare": 0.25, "load_model": 1.0, "build_driver": 0.25, "driver_warmup": 3.0}
    summary = {
        "status": "completed",
        "name": "night",
        "model": "tiny",
        "dataset": "synthetic",
        "workload_hash": WORKLOAD,
        "num_prompts": 4,
        "num_generations": 1,
        "max_new_tokens": 25,
        "is_fixed_length": True,
        "num_rounds": len(walls_s),
        "num_requests": 4 * len(walls_s),
        "num_prompt_tokens": 40 * len(walls_s),
        "output_tokens_per_s": spread,
        "durations_s": durations_s | {"total": 6.75 + sum(walls_s)},
        "compile_s": 2.0,
        "prefill_share": 0.2,
        "mixed_share": 0.0,
        "decode_share": 0.7,
        "outside_steps_share": 0.1,
        "decode_step_s": {"mean": 0.002, "p50": 0.002, "p90": 0.003, "p99": 0.004},
        "mean_batch": 4.0,
        "peak_allocated_gib": 1.5,
        "peak_host_gib": 0.5,
        "roofline_fraction": 0.5,
        "bandwidth_bytes_per_s": 1e12,
        "accuracy": None,
        "warnings": [],
    }
    return summary | more


@pytest.fixture
def make_run(tmp_path):
    """Writes a completed run and returns its folder; `status` and `message` make it one that ended otherwise."""

    def make(
        folder_name,
        overrides=("model=tiny",),
        walls_s=(1.0, 1.1, 1.2, 1.3, 1.4),
        status="completed",
        digest="d",
        environment=None,
        **values,
    ):
        folder = tmp_path / folder_name
        command = f"python -m cbexp {' '.join(overrides)}"
        write_json(folder / "cell.json", {"overrides": list(overrides), "command": command})
        ended = {"status": status, "message": values.pop("message", None), "pid": 1, "host": "elsewhere"}
        write_json(folder / "status.json", ended | {"error_class": values.pop("error_class", None)})
        write_json(folder / "environment.json", environment or {"versions": {"torch": "2.11.0"}})
        rounds = [round_record(index, wall_s, digest) for index, wall_s in enumerate(walls_s, start=1)]
        write_lines(folder / "rounds.jsonl", [round_record(0, 2.0) | {"is_warmup": True}, *rounds])
        if status == "completed":
            write_json(folder / "summary.json", summary_of(walls_s, **values))
        return folder

    return make
