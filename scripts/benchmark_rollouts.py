"""Measures whole rollout rounds of several systems on the same prompts and completion lengths, and writes their table.

    PYTHONPATH=. python scripts/benchmark_rollouts.py --into outputs/reference/rollouts_h200 \\
        --systems sync sync:reduce_overhead manager vllm --vllm-pythonpath /tmp/vllm_site \\
        --manager-override model.attn_implementation=flash_attention_3

A system is `sync`, `manager` or `generate` (drivers of cbexp), with `:MODE` for a choice of compile, or `vllm`. Each
(workload, system) leaves WORKLOAD/SYSTEM.json in the folder; one that is there is never measured again, so that the
work can be split over several calls (`--only 'rollout_32/*'`). The table is of all that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_setup import is_asked_for, write_json
from rollout_records import build_record, read_cbexp_run, write_table
from rollout_workloads import UnlikeWorkError, Workload, build_workload, write_model_folder

from cbexp.errors import CbexpError

WORKLOADS = ("rollout_32", "rollout_256", "rollout_natural")
SYSTEMS = ("sync", "manager", "vllm")
VLLM = "vllm"
RESULT = "RESULT "
SCRIPTS = Path(__file__).resolve().parent
NUM_LOG_LINES = 15


class SystemFailedError(Exception):
    """A system's process failed; the message has the end of its log."""


@dataclass(frozen=True)
class Task:
    """A workload that a system is to run, and the overrides of its cbexp command (none for vLLM)."""

    workload: Workload
    system: str
    overrides: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return self.system.replace(":", "_")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, required=True, help="folder of the records and the table")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("outputs/benchmark_rollouts"), help="logs and whole runs"
    )
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, help="experiments that ignore EOS")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="WORKLOAD/SYSTEM, as in 'rollout_32/sync*'"
    )
    parser.add_argument("--model", default="qwen3_4b", help="of conf/model; its weights are random")
    parser.add_argument("--rounds", type=int, default=5, help="timed ones; the median counts")
    parser.add_argument("--warmup-rounds", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one system's process")
    for target in ("", "sync-", "manager-"):
        parser.add_argument(f"--{target}override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--vllm-command", default=sys.executable, help="its Python, with arguments if need be"
    )
    parser.add_argument("--vllm-pythonpath", help="its PYTHONPATH (ours is not passed on)")
    return parser.parse_args()


def common_overrides(arguments: argparse.Namespace) -> list[str]:
    return [f"model={arguments.model}", "model.init=random", *arguments.override]


def plan_tasks(arguments: argparse.Namespace) -> list[Task]:
    """What is asked for and has not been measured, workload by workload."""
    tasks: list[Task] = []
    for name in arguments.workloads:
        workload, config, plan = build_workload(name, common_overrides(arguments))
        if VLLM in arguments.systems:
            write_model_folder(model_folder(arguments), config, plan)
        tasks += choose_tasks(arguments, workload)
    return tasks


def choose_tasks(arguments: argparse.Namespace, workload: Workload) -> list[Task]:
    tasks = []
    for system in arguments.systems:
        task, name = Task(workload, system, system_overrides(arguments, system)), f"{workload.name}/{system}"
        if record_path(arguments, task).exists():
            print(f"{name}: measured before", flush=True)
        elif is_asked_for(name, arguments.only):
            tasks.append(task)
    return tasks


def system_overrides(arguments: argparse.Namespace, system: str) -> tuple[str, ...]:
    driver, _, mode = system.partition(":")
    if driver == VLLM:
        return ()
    own = {"sync": arguments.sync_override, "manager": arguments.manager_override}.get(driver, [])
    return (*common_overrides(arguments), f"driver={driver}", f"compile={mode or 'auto'}", *own)


def model_folder(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work_dir.resolve(), f"{arguments.model}_config")


def record_path(arguments: argparse.Namespace, task: Task) -> Path:
    return Path(arguments.into, task.workload.name, f"{task.file_name}.json")


def run_process(command: Sequence[str], environment: dict[str, str], stem: Path, timeout_s: float) -> str:
    """Run `command` and return what it prints; STEM.out has that, STEM.log what it writes to stderr."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    output, log = stem.with_suffix(".out"), stem.with_suffix(".log")
    with output.open("w") as stdout, log.open("w") as stderr:
        try:
            done = subprocess.run(command, env=environment, stdout=stdout, stderr=stderr, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise SystemFailedError(f"it took more than --timeout-s={timeout_s:g} (log: {log})") from error
        except OSError as error:
            raise SystemFailedError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode != 0:
        tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])
        raise SystemFailedError(f"exit code {done.returncode} (log: {log})\n  {tail}")
    return output.read_text(errors="replace")


def run_cbexp(task: Task, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job of `python -m cbexp` and return its record."""
    folder = arguments.work_dir.resolve() / task.workload.name / task.file_name
    if folder.exists():
        raise SystemFailedError(f"{folder} is there already, from a run that left no record: remove it first")
    overrides = [f"experiment={task.workload.name}", *task.overrides]
    rounds = [f"num_rounds={arguments.rounds}", f"num_warmup_rounds={arguments.warmup_rounds}"]
    records = ["tracking=disabled", "artifacts.completions=all", f"hydra.run.dir='{folder}'"]
    command = [sys.executable, "-m", "cbexp", *overrides, *rounds, *records]
    run_process(command, dict(os.environ), folder, arguments.timeout_s)
    return read_cbexp_run(folder, task.workload, task.system, overrides)


def run_vllm(workloads: list[Workload], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the workloads in one vLLM process, which takes long to start, and yield their records."""
    work_dir = arguments.work_dir.resolve()
    command = [*shlex.split(arguments.vllm_command), str(SCRIPTS / "vllm_rollout.py")]
    command += ["--model", str(model_folder(arguments)), "--rounds", str(arguments.rounds)]
    command += ["--warmup-rounds", str(arguments.warmup_rounds)]
    for workload in workloads:
        path = work_dir / workload.name / "workload.json"
        workload.write(path)
        command += ["--workload", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if arguments.vllm_pythonpath is not None:
        environment["PYTHONPATH"] = arguments.vllm_pythonpath
    printed = run_process(command, environment, work_dir / VLLM, arguments.timeout_s).splitlines()
    results = [json.loads(line.removeprefix(RESULT)) for line in printed if line.startswith(RESULT)]
    for workload, result in zip(workloads, results, strict=True):
        workload.check_lengths(VLLM, result["completion_lengths"])
        facts = {key: result[key] for key in ("set_up_s", "gpu", "versions", "settings")}
        yield build_record(workload, VLLM, result["wall_times_s"], facts)


def keep(arguments: argparse.Namespace, task: Task, record: dict[str, Any]) -> None:
    write_json(record_path(arguments, task), record)
    rate = record["output_tokens_per_s"]["median"]
    print(f"{task.workload.name}/{task.system}: {rate:,.0f} output tokens/s", flush=True)


def measure(tasks: Sequence[Task], arguments: argparse.Namespace) -> list[str]:
    """Run the tasks, whatever becomes of one of them, and return what went wrong."""
    failures: list[str] = []
    for task in tasks:
        if task.system != VLLM:
            with collecting(failures, f"{task.workload.name}/{task.system}"):
                keep(arguments, task, run_cbexp(task, arguments))
    with_vllm = [task for task in tasks if task.system == VLLM]
    if with_vllm:
        with collecting(failures, VLLM):
            records = run_vllm([task.workload for task in with_vllm], arguments)
            for task, record in zip(with_vllm, records, strict=True):
                keep(arguments, task, record)
    with collecting(failures, "table"):
        sys.stdout.write(write_table(arguments.into))
    return failures


@contextmanager
def collecting(failures: list[str], name: str) -> Iterator[None]:
    try:
        yield
    except (SystemFailedError, UnlikeWorkError) as error:
        failures.append(f"{name}: {error}")
        print(f"{name}: FAILED", flush=True)


def main() -> None:
    arguments = parse_arguments()
    try:
        tasks = plan_tasks(arguments)
    except (CbexpError, UnlikeWorkError) as error:
        sys.exit(f"nothing was run: {error}")
    failures = measure(tasks, arguments)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
