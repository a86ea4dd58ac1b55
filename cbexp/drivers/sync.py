"""The engine's own driver, as an experiment builds it."""

from __future__ import annotations

from cbexp.drivers.inputs import DriverInputs
from cbexp.engine import RolloutDriver, SyncCBDriver


def build(inputs: DriverInputs) -> RolloutDriver:
    """Return the driver."""
    return SyncCBDriver(inputs.model, config=inputs.settings, tokenizer=inputs.tokenizer)
