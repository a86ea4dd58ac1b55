"""Keeps measured runs as a reference: copies the small records of jobs, without the paths of their machine.

    python scripts/collect_reference.py outputs/rollout_32/DATE_TIME --into outputs/reference/h200
    python -m cbexp.report outputs/reference/h200

Each job goes into a folder of its own name. An interrupted one is kept as it is: the report says how it ended.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

JOB_FILES = (
    "cell.json",
    "config.yaml",
    "status.json",
    "environment.json",
    "engine.json",
    "rounds.jsonl",
    "summary.json",
)
ABSOLUTE_PATH = re.compile(r"(?<![\w.~])(?:~|/[\w.+-]+)?/(?:[\w.+-]+/)*([\w.+-]+)")


def find_jobs(sources: list[Path]) -> list[Path]:
    """Folders with a status.json at or below `sources`, in order of their names."""
    jobs = sorted({path.parent for source in sources for path in source.rglob("status.json")})
    if not jobs:
        sys.exit(f"no job (no status.json) in {', '.join(map(str, sources))}")
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        sys.exit("two of these jobs have folders of the same name: collect them apart")
    return jobs


def keep_job(job: Path, into: Path, commit: str | None) -> Path:
    kept = into / job.name
    if kept.exists():
        sys.exit(f"{kept} is there already: remove it first, results are never overwritten")
    kept.mkdir(parents=True)
    for name in JOB_FILES:
        if (job / name).exists():
            keep_file(job / name, kept / name)
    environment = kept / "environment.json"
    if commit is not None and environment.exists():
        add_commit(environment, commit)
    return kept


def keep_file(source: Path, target: Path) -> None:
    target.write_text(without_paths(source.read_text(encoding="utf-8")), encoding="utf-8")


def without_paths(text: str) -> str:
    """`text` with absolute paths shortened to their last part."""
    return ABSOLUTE_PATH.sub(r"\1", text)


def add_commit(path: Path, commit: str) -> None:
    """Name the commit of a job that ran from a copy without its history."""
    environment: dict[str, Any] = json.loads(path.read_text())
    if environment["source"]["commit"] not in (None, commit):
        sys.exit(f"{path}: the job ran from {environment['source']['commit']}, not from --commit={commit}")
    environment["source"] = {"commit": commit, "is_dirty": False}
    path.write_text(json.dumps(environment, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, nargs="+", help="folders of jobs or sweeps")
    parser.add_argument("--into", type=Path, required=True, help="where they are kept")
    parser.add_argument("--commit", help="what the jobs ran, for those that ran from a copy without git")
    arguments = parser.parse_args()
    for job in find_jobs(arguments.sources):
        print(keep_job(job, arguments.into, arguments.commit))


if __name__ == "__main__":
    main()
