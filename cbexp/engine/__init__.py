"""Generation on the caller's own model: takes transformers objects and `CBSyncConfig`, knows nothing of experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbexp.engine.rollout_driver import RolloutDriver
from cbexp.engine.support import SUPPORTED_TRANSFORMERS, check_transformers_version
from cbexp.engine.types import (
    CacheMemoryError,
    CBSyncConfig,
    Completion,
    EngineError,
    FinishReason,
    OnStep,
    RequestTimings,
    Sampling,
    Scores,
    StepInfo,
    StepKind,
    UnsupportedModelError,
    UnsupportedTransformersError,
)

if TYPE_CHECKING:
    from cbexp.engine.driver import SyncCBDriver

__all__ = [
    "SUPPORTED_TRANSFORMERS",
    "CBSyncConfig",
    "CacheMemoryError",
    "Completion",
    "EngineError",
    "FinishReason",
    "OnStep",
    "RequestTimings",
    "RolloutDriver",
    "Sampling",
    "Scores",
    "StepInfo",
    "StepKind",
    "SyncCBDriver",
    "UnsupportedModelError",
    "UnsupportedTransformersError",
    "check_transformers_version",
]


def __getattr__(name: str) -> Any:
    """Import the driver when it is asked for: what checks versions must not need a transformers that works."""
    if name != "SyncCBDriver":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cbexp.engine.driver import SyncCBDriver

    return SyncCBDriver
