"""The engine's own driver, as an experiment builds it."""

from __future__ import annotations

from transformers import GenerationConfig

from cbexp.drivers.inputs import DriverInputs
from cbexp.engine import RolloutDriver, SyncCBDriver


def build(inputs: DriverInputs) -> RolloutDriver:
    """Return the driver; with an empty generation config, so that nothing of the model's own leaks in."""
    return SyncCBDriver(inputs.model, GenerationConfig(), inputs.settings)
