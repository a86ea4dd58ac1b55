"""Brings vLLM up in its worker, which takes minutes: what it is given, how far it is, what it found here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from cbexp.drivers.vllm.failures import describe_not_installed, read_last_line, require_event
from cbexp.drivers.vllm.process import WorkerProcess, WorkerTimeoutError
from cbexp.engine.requests import RequestLimits
from cbexp.engine.types import CBSyncConfig, EngineError
from cbexp.errors import NotApplicableError

PROGRESS_INTERVAL_S = 15.0
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # in the names of variables


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """How the worker is started, and what it serves.

    `environment` is the worker's whole. `engine` has the arguments of vLLM's `LLM`. `device_type` (cuda or cpu) is what
    the settings were resolved for. Of `settings` it reads the mode, limit, stop ids, sampling and log-probabilities.
    `model_defaults`: the checkpoint's own generation config, which vLLM is not given.
    """

    python: str
    environment: Mapping[str, str]
    log_path: Path
    start_timeout_s: float
    engine: Mapping[str, Any]
    device_type: str
    settings: CBSyncConfig
    request_limits: RequestLimits
    model_defaults: GenerationConfig | None = None

    @property
    def gpu(self) -> str | None:
        """The GPU that the worker sees; None on a CPU."""
        return self.environment["CUDA_VISIBLE_DEVICES"] if self.device_type == "cuda" else None

    @property
    def vllm_variables(self) -> dict[str, str]:
        """Variables of vLLM's own, on which its figures depend as on arguments; but no secrets."""
        return {
            name: value
            for name, value in sorted(self.environment.items())
            if name.startswith("VLLM_") and not any(word in name for word in SECRETS)
        }

    @property
    def has_request_times(self) -> bool:
        """Whether vLLM records when each request was scheduled, got its first token and ended."""
        return not self.engine["disable_log_stats"]


class _Start:
    """A start under way: the time it may still take, and what is said of it meanwhile."""

    def __init__(self, config: VllmConfig, on_progress: Callable[[str], None]) -> None:
        self._config = config
        self._on_progress = on_progress
        self._start_s = time.monotonic()
        self._said_s = self._start_s
        self._phase = ""

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._start_s

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._say(f"vLLM: {phase} ...")

    def receive(self, worker: WorkerProcess) -> dict[str, Any]:
        try:
            return worker.receive(self._config.start_timeout_s - self.passed_s, self._on_wait)
        except WorkerTimeoutError as error:
            raise EngineError(
                f"vLLM did not start within driver.start_timeout_s={self._config.start_timeout_s:g} seconds; it was "
                f"{self._phase}, and its last line was {read_last_line(self._config.log_path)!r}. "
                f"Its log: {self._config.log_path}"
            ) from error

    def _on_wait(self) -> None:
        if time.monotonic() - self._said_s >= PROGRESS_INTERVAL_S:
            last = read_last_line(self._config.log_path)
            self._say(f"vLLM: {self._phase}, {self.passed_s:.0f} s so far; {last}")

    def _say(self, text: str) -> None:
        self._said_s = time.monotonic()
        self._on_progress(text)


def start_engine(
    worker: WorkerProcess, config: VllmConfig, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Wait until the worker's engine is up; returns versions, device and settings as vLLM has resolved them.

    Raises as `VllmDriver`, and `WorkerEndedError` and `WorkerMessageError`.
    """
    start = _Start(config, on_progress)
    start.enter("starting Python")
    worker.send({"engine": dict(config.engine)})
    answer = start.receive(worker)
    if answer["event"] == "not_installed":
        raise describe_not_installed(
            require_event(answer, "not_installed", "starting", config.log_path)["python"]
        )
    require_event(answer, "importing", "starting", config.log_path)
    start.enter("importing")
    imported = require_event(start.receive(worker), "imported", "importing", config.log_path)
    _check_device(imported["device_type"], config)
    start.enter("loading weights, compiling and capturing")
    ready = require_event(start.receive(worker), "ready", "building its engine", config.log_path)
    facts: dict[str, Any] = {key: imported[key] for key in ("versions", "device_type", "device_name")}
    seconds = {"import": imported["import_s"], "engine": ready["engine_s"], "total": start.passed_s}
    on_progress(_describe_ready(facts, ready["settings"], start.passed_s))
    return {**facts, **ready["settings"], "start_s": seconds}


def _check_device(found: str | None, config: VllmConfig) -> None:
    if found != config.device_type:
        raise NotApplicableError(
            f"driver=vllm: the settings are for {config.device_type} (model.device), and this build of vLLM takes "
            f"{found or 'no device that is here'}. Install a build for {config.device_type}, or set model.device."
        )


def _describe_ready(facts: Mapping[str, Any], settings: Mapping[str, Any], passed_s: float) -> str:
    text = f"vLLM {facts['versions']['vllm']} on {facts['device_name']}, ready in {passed_s:.0f} s"
    num_blocks, page_size = settings["num_blocks"], settings["page_size"]
    if num_blocks and page_size:
        text += f"; cache {num_blocks * page_size:,} tokens: {num_blocks:,} blocks of {page_size:,}"
    return text
