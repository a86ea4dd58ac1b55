"""Stands for cbexp.experiment in the processes of a test's cells: ends as FAKE_ENDS (seed → how) says, and no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from cbexp.artifacts import RunDirectory
from cbexp.errors import DatasetError, MemoryBudgetError, NotApplicableError, ResultsError

BAD_ENDS = {
    "fail": ("failed", DatasetError("there are no rows")),
    "out_of_memory": ("out_of_memory", MemoryBudgetError("asked for too much")),
    "not_applicable": ("not_applicable", NotApplicableError("there is no GPU")),
}
SUMMARY = {"decode_tps": 100.0, "output_tokens_per_s": {"median": 100.0, "min": 99.0, "max": 101.0}}


def run_experiment(config, run_dir, overrides, sweep):
    how = json.loads(os.environ["FAKE_ENDS"]).get(str(config.seed), "complete")
    log_call(config, overrides, sweep)
    print(f"cell of seed {config.seed}: {how}", flush=True)
    if how == "die_before_status":
        os._exit(3)
    if how == "no_place":
        raise ResultsError("no place to write to")
    if how == "bug":
        raise ZeroDivisionError("a bug")
    directory = RunDirectory.create(run_dir, config.artifacts)
    if how in BAD_ENDS:
        status, error = BAD_ENDS[how]
        directory.mark(status, error)
        return SimpleNamespace(status=status, summary=None, message=str(error))
    try:
        behave(how)
    except KeyboardInterrupt as stop:
        directory.mark("interrupted", stop)
        return SimpleNamespace(status="interrupted", summary=None, message=str(stop))
    if config.stats_path:
        Path(config.stats_path).write_text("{}")
    directory.write_summary(SUMMARY, None)
    return SimpleNamespace(status="completed", summary=SUMMARY, message=None)


def behave(how):
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        time.sleep(600)
    elif how == "ignore_signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("ignoring", flush=True)
        time.sleep(600)
    elif how == "leave_child":
        child = subprocess.Popen(["sleep", "600"])
        print(f"child {child.pid}", flush=True)
    elif how == "exit":
        sys.exit(0)
    elif how == "meet":  # ends when another cell has begun
        log = Path(os.environ["FAKE_LOG"])
        while len(log.read_text().splitlines()) < 2:
            time.sleep(0.02)


def log_call(config, overrides, sweep):
    call = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "seed": config.seed,
        "cwd": os.getcwd(),
        "overrides": overrides,
        "sweep": [sweep.group, sweep.num_jobs, sweep.job_index] if sweep else None,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "variable": os.environ.get("FROM_ENV_SET"),
    }
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(call) + "\n")
