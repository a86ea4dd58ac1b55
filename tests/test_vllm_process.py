"""A worker's process: what keeps it from starting, and how it is told that it has ended."""

from __future__ import annotations

import signal
import sys

import pytest

from cbexp.engine.types import EngineError
from cbexp.errors import ConfigError
from cbexp.peers.vllm_process import WorkerEndedError, WorkerProcess


def test_a_log_that_cannot_be_written_is_not_laid_to_the_interpreter(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"the worker's log .*file/vllm.log cannot be written"):
        WorkerProcess([sys.executable, "-c", ""], {}, tmp_path / "file" / "vllm.log")


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"driver.python=.*/none cannot be started: No such file"):
        WorkerProcess([str(tmp_path / "none")], {}, tmp_path / "vllm.log")


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    code = f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 2})"
    worker = WorkerProcess([sys.executable, "-c", code], {}, tmp_path / "vllm.log")
    with pytest.raises(WorkerEndedError, match=f"killed by signal {signal.SIGRTMIN + 2}$"):
        worker.receive(timeout_s=20)
    worker.kill()
