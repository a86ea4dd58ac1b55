"""Whether the runs of a sweep can go online as they are told to, found out before its first cell runs."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cbexp.config import TrackingConfig
from cbexp.tracking.modes import choose_mode

SERVICE_VARIABLE = "WANDB_SERVICE"  # by which wandb's own process is known to this one and its children


def refuse_impossible_online(configs: Iterable[TrackingConfig], is_local: bool) -> None:
    """Refuse a sweep whose jobs would be refused one by one for `tracking=online`, or logged in vain at its end.

    Cells that are not `is_local` find their credentials where they run. Imports wandb only for what is to go online.

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
    """End wandb's own process: cells would find it by the variable, share it, and outlive it."""
    import wandb

    wandb.teardown()
