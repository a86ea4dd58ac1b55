"""Settings of what is kept and looked at afterwards: Weights & Biases, files, rescoring."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cbexp.checks import check_at_least, check_choice, check_is_set
from cbexp.errors import ConfigError

TRACKING_MODES = ("auto", "online", "offline", "disabled")


@dataclass
class TrackingConfig:
    """Weights & Biases. `max_logged_completions` bounds the completions table (rows).

    `per_cell` false: a sweep is one run with a table of its cells. `max_memory_gib` is a search's limit: the objective
    of a run whose peak memory is above it is 0.
    """

    mode: str = "auto"
    project: str = "cbexp"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    per_cell: bool = True
    max_memory_gib: float | None = None
    log_completions: bool = False
    max_logged_completions: int = 100

    def __post_init__(self) -> None:
        check_choice("tracking.mode", self.mode, TRACKING_MODES)
        check_is_set(
            "tracking.project", self.project, "give the project's name, as in tracking.project=cbexp"
        )
        check_at_least("tracking.max_logged_completions", self.max_logged_completions, 1)
        if self.max_memory_gib is not None and not self.max_memory_gib > 0:
            raise ConfigError(
                f"tracking.max_memory_gib={self.max_memory_gib} must be a number above 0 (GiB)."
            )


@dataclass
class ArtifactsConfig:
    """What the run directory keeps. `completions`: all, none, or the number of completions kept a round."""

    completions: str = "all"

    def __post_init__(self) -> None:
        if self.completions not in ("all", "none") and not re.fullmatch("[0-9]+", self.completions):
            raise ConfigError(
                f"artifacts.completions={self.completions} must be all, none or a number of rows."
            )


@dataclass
class RescoreConfig:
    """How many completions of the timed rounds the model's own forward rescores: a number (0: none), or all."""

    completions: str = "8"

    def __post_init__(self) -> None:
        if self.completions != "all" and not re.fullmatch("[0-9]+", self.completions):
            raise ConfigError(
                f"rescore.completions={self.completions} must be all or a number of completions, 0 for none."
            )
