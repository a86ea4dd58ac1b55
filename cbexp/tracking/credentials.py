"""Checks before a sweep's first cell whether runs with `tracking=online` can go online."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cbexp.config import TrackingConfig
from cbexp.tracking.modes import choose_mode

SERVICE_VARIABLE = "WANDB_SERVICE"  # names wandb's own process to this one and its children


def refuse_impossible_online(configs: Iterable[TrackingConfig], is_local: bool) -> None:
    """Refuse a sweep with `tracking=online` that could not go online.

    Cells that are not `is_local` find their credentials where they run. wandb is imported only where it is needed.

    Raises:
        ConfigError: `online` without credentials, or against wandb's own mode.
    """
    online = [config for config in configs if config.mode == "online" and (is_local or not config.per_cell)]
    if not online:
        return
    has_service = SERVICE_VARIABLE in os.environ
    try:
        choose_mode(online[0])
    finally:
        if not has_service:
            _end_service()


def _end_service() -> None:
    """End wandb's own process. Cells would find it by the variable and share it, and it ends before they do."""
    import wandb

    wandb.teardown()
