"""Which of wandb's own variables go unheard in a run, since the configuration says otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cbexp.config import TrackingConfig
from cbexp.tracking.identity import is_under_agent


def find_idle_variables(config: TrackingConfig, run_name: str, group: str | None) -> list[str]:
    """A sentence for each variable that is set and has no effect; an agent's own are its and no user's."""
    heard_by_agent = ("WANDB_PROJECT", "WANDB_ENTITY")
    return [
        f"{variable}={os.environ[variable]} has no effect: {setting}={used} goes before it."
        for variable, setting, used in _settings(config, run_name, group)
        if used
        and os.environ.get(variable, used) not in ("", used)
        and not (is_under_agent() and variable in heard_by_agent)
    ]


def _settings(
    config: TrackingConfig, run_name: str, group: str | None
) -> Iterator[tuple[str, str, str | None]]:
    """A variable, the setting that goes before it, and that one's value."""
    yield "WANDB_PROJECT", "tracking.project", config.project
    yield "WANDB_ENTITY", "tracking.entity", config.entity
    yield "WANDB_TAGS", "tracking.tags", ",".join(config.tags)
    yield "WANDB_RUN_GROUP", "the group", group
    yield "WANDB_NAME", "the run's name", run_name
