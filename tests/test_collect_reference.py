"""Keeping measured runs: the table says what the records say, and unlike work is not put into one."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "collect_reference.py"


def write_job(folder: Path, driver: str, tokens_per_s: float, workload: str = "a") -> None:
    (folder / ".hydra").mkdir(parents=True)
    summary = {
        "backend": driver,
        "attn_impl": "sdpa",
        "compile_mode": "eager",
        "workload_hash": workload,
        "output_tokens_per_s": {"median": tokens_per_s, "min": 1.0, "max": 9999.6},
        "peak_memory_gb": 12.34,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / ".hydra" / "overrides.yaml").write_text(f"- experiment=rollout_32\n- driver={driver}\n")
    for name in ("engine.json", "environment.json", "rounds.jsonl", "status.json"):
        (folder / name).write_text("{}")


def collect(*arguments: object):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_table_of_two_jobs(tmp_path):
    write_job(tmp_path / "runs" / "0", "sync", 708.4)
    write_job(tmp_path / "runs" / "1", "generate", 860.0)
    done = collect(tmp_path / "runs", "--into", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2:] == [
        "| sync | sdpa | eager | 708 | 1 to 10,000 | 12.3 GB | `experiment=rollout_32 driver=sync` |",
        "| generate | sdpa | eager | 860 | 1 to 10,000 | 12.3 GB | `experiment=rollout_32 driver=generate` |",
    ]
    assert (tmp_path / "kept" / "table.md").read_text() == done.stdout
    assert (tmp_path / "kept" / "sync_sdpa_eager" / "engine.json").exists()
    again = collect(tmp_path / "runs", "--into", tmp_path / "kept")
    assert again.returncode == 1
    assert "never overwritten" in again.stderr


def test_unlike_work_is_refused(tmp_path):
    write_job(tmp_path / "runs" / "0", "sync", 1.0, workload="a")
    write_job(tmp_path / "runs" / "1", "generate", 1.0, workload="b")
    done = collect(tmp_path / "runs", "--into", tmp_path / "kept")
    assert done.returncode == 1
    assert "workload_hash" in done.stderr
    assert not (tmp_path / "kept").exists()
