"""Generation on the caller's own model: takes transformers objects and `CBSyncConfig`, knows nothing of experiments."""

from cbexp.engine.compatibility import SUPPORTED_TRANSFORMERS, check_transformers_version
from cbexp.engine.driver import SyncCBDriver
from cbexp.engine.types import (
    CacheMemoryError,
    CBSyncConfig,
    Completion,
    EngineError,
    FinishReason,
    OnStep,
    RequestTimings,
    RolloutDriver,
    StepInfo,
    StepKind,
    UnsupportedModelError,
    UnsupportedTransformersError,
)

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
    "StepInfo",
    "StepKind",
    "SyncCBDriver",
    "UnsupportedModelError",
    "UnsupportedTransformersError",
    "check_transformers_version",
]
