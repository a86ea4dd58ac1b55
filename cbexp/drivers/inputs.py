"""What any driver is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbexp.engine.types import CBSyncConfig
from cbexp.planning.plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class DriverInputs:
    """`settings` are the plan's, with the stop ids of the model and the sizes of the round.

    `model` is the loaded one; a driver with a process of its own does without it, and writes its log to `log_path`.
    `on_progress` gets lines about a slow start. `prompt_lengths` in tokens. `tokenizer` is there for datasets of text.
    """

    plan: RunPlan
    settings: CBSyncConfig
    model: Any
    prompt_lengths: Sequence[int]
    tokenizer: Any = None
    log_path: Path | None = None
    on_progress: Callable[[str], None] = lambda _: None
