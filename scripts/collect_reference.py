"""Keeps measured runs for the README: copies the small records of completed jobs and writes their table.

python -m cbexp -m experiment=rollout_32 model=qwen3_4b model.init=random driver=sync,manager,generate
python scripts/collect_reference.py outputs/rollout_32/DATE_TIME --into outputs/reference/rollout_32
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

KEPT = (
    "summary.json",
    "engine.json",
    "environment.json",
    "rounds.jsonl",
    "status.json",
    ".hydra/overrides.yaml",
)
HEADER = (
    "| driver | attention | compile | output tokens/s (median) | range | peak device memory | command's overrides |\n"
    "|---|---|---|---|---|---|---|\n"
)


def find_completed_jobs(sources: list[Path]) -> list[Path]:
    """Folders with a summary.json at or below `sources`, in order of their names."""
    jobs = sorted({path.parent for source in sources for path in source.rglob("summary.json")})
    if not jobs:
        sys.exit(f"no completed job (no summary.json) in {', '.join(map(str, sources))}")
    hashes = {load(job)["workload_hash"] for job in jobs}
    if len(hashes) > 1:
        sys.exit("these jobs did different work (their workload_hash differs): collect them apart")
    return jobs


def load(job: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((job / "summary.json").read_text())
    return summary


def keep_job(job: Path, into: Path) -> Path:
    summary = load(job)
    kept = into / f"{summary['backend']}_{summary['attn_impl']}_{summary['compile_mode']}"
    if kept.exists():
        sys.exit(f"{kept} is there already: remove it first, results are never overwritten")
    kept.mkdir(parents=True)
    for name in KEPT:
        shutil.copy(job / name, kept / Path(name).name)
    return kept


def describe_job(kept: Path) -> str:
    summary = load(kept)
    rate, memory = summary["output_tokens_per_s"], summary["peak_memory_gb"]
    overrides = " ".join(
        line.removeprefix("- ") for line in (kept / "overrides.yaml").read_text().splitlines()
    )
    cells = (
        summary["backend"],
        summary["attn_impl"],
        summary["compile_mode"],
        f"{rate['median']:,.0f}",
        f"{rate['min']:,.0f} to {rate['max']:,.0f}",
        "-" if memory is None else f"{memory:.1f} GB",
        f"`{overrides}`",
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, nargs="+", help="folders of jobs or sweeps")
    parser.add_argument("--into", type=Path, required=True, help="where they are kept")
    arguments = parser.parse_args()
    kept = [keep_job(job, arguments.into) for job in find_completed_jobs(arguments.sources)]
    table = HEADER + "".join(describe_job(job) for job in kept)
    (arguments.into / "table.md").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
