"""Experiments with driver=vllm, run by the stand-in for vLLM in `tests/fake_vllm`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbexp.config import (
    CacheConfig,
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.dataset.prompts import load_prompts
from cbexp.drivers.vllm.driver import VllmDriver
from cbexp.factory import build_driver
from cbexp.model.loading import describe_model
from cbexp.planning.plan import build_plan
from tests.model_fixtures import QWEN3
from tests.sweep.conftest import is_running, wait_until

FAKE = Path(__file__).with_name("fake_vllm")


class FakeVllm:
    """Where the stand-in writes down what it was given and did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self._path = tmp_path / "notes.jsonl"
        monkeypatch.setenv("FAKE_VLLM", str(tmp_path))

    def misbehave(self, words: str) -> None:
        (self.tmp_path / "orders.txt").write_text(words)

    def notes(self, kind: str) -> list[Any]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [value for noted, value in map(json.loads, lines) if noted == kind]


def experiment(
    fake: FakeVllm,
    driver: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    num_generations: int = 1,
    compile_mode: str = "auto",
    **sampling: Any,
) -> ExperimentConfig:
    return ExperimentConfig(
        model=ModelConfig(name="test", init="random", architecture=QWEN3, device="cpu"),
        dataset=DatasetConfig(
            kind="synthetic",
            name="synthetic",
            num_prompts=4,
            num_generations=num_generations,
            min_length=5,
            max_length=12,
        ),
        sampling=SamplingConfig(**({"max_new_tokens": 8, "ignore_eos": True} | sampling)),
        cache=CacheConfig(**(cache or {})),
        compile=CompileConfig(mode=compile_mode, cache_dir=str(fake.tmp_path / "compile")),
        driver=DriverConfig(**({"name": "vllm", "pythonpath": str(FAKE)} | (driver or {}))),
        tracking=TrackingConfig(mode="disabled"),
        num_warmup_rounds=1,
        num_rounds=2,
    )


def build(
    config: ExperimentConfig, fake: FakeVllm, on_progress: Callable[[str], None] = lambda _: None
) -> tuple[VllmDriver, list[list[int]]]:
    prompts = load_prompts(config.dataset, None, QWEN3["vocab_size"], config.seed, ())
    eos = tuple(config.sampling.eos_token_ids or ()) if not config.sampling.ignore_eos else ()
    log_path = fake.tmp_path / "vllm.log"
    driver = build_driver(
        build_plan(config),
        describe_model(config.model),
        prompts,
        eos,
        0,
        log_path=log_path,
        on_progress=on_progress,
    )
    assert isinstance(driver, VllmDriver)
    return driver, [list(ids) for ids in prompts.prompt_ids]


def complete(prompt_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    """What the stand-in answers."""
    return tuple((sum(prompt_ids) + place) % 97 for place in range(num_tokens))


def write_hanging_python(folder: Path) -> tuple[Path, Path]:
    """A wrapper that never comes to start Python, and the file where it puts its own id and its child's."""
    wrapper, pids = folder / "hang.sh", folder / "pids"
    wrapper.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {pids}.new\nmv {pids}.new {pids}\nwait\n")
    wrapper.chmod(0o755)
    return wrapper, pids


def read_pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    """Wait for the processes to end; those that do not are killed, for the sake of other tests."""
    try:
        wait_until(lambda: not any(map(is_running, pids)), 10)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
