"""A trainer on the embedded model, and a driver that answers as it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cbexp.trl import CBGRPOTrainer
from tests.trl.trainers import (
    FakeDriver,
    build_args,
    build_dataset,
    load_model,
    load_tokenizer,
    reward_right_answers,
)


@pytest.fixture
def build_trainer(tmp_path) -> Callable[..., CBGRPOTrainer]:
    """Takes settings of `GRPOConfig` in `args`, and the trainer's own by name."""

    def build(args: dict[str, Any] | None = None, **own: Any) -> CBGRPOTrainer:
        defaults = {
            "model": own.pop("model", None) or load_model(),
            "reward_funcs": reward_right_answers,
            "train_dataset": build_dataset(),
            "processing_class": load_tokenizer(),
            "num_rescored": 0,
        }
        return CBGRPOTrainer(args=build_args(tmp_path / "run", **args or {}), **defaults | own)

    return build


@pytest.fixture
def fake_driver(monkeypatch) -> type[FakeDriver]:
    """Every trainer drives a `FakeDriver` subclass, whose `answer` a test may set."""
    driver = type("Fake", (FakeDriver,), {})
    monkeypatch.setattr("cbexp.trl.trainer.SyncCBDriver", driver)
    return driver
