"""What the paged engine tells of a step that has run."""

from __future__ import annotations

from dataclasses import dataclass

from cbexp.engine.types import StepKind


@dataclass(frozen=True)
class EngineOutput:
    """A request that has ended; `error` says why it failed, None when it did not."""

    request_id: str
    completion_ids: tuple[int, ...]
    error: str | None


@dataclass(frozen=True)
class EngineStep:
    """A batch or a burst that has run: who was in it, who got a token, who ended; cache use while it ran, in [0, 1].

    `num_steps`, `num_tokens`, `num_padding` and `bucket` as in `StepInfo`.
    """

    kind: StepKind
    num_tokens: int
    request_ids: tuple[str, ...]
    token_request_ids: tuple[str, ...]
    outputs: tuple[EngineOutput, ...]
    num_waiting: int
    cache_used_fraction: float
    num_steps: int = 1
    num_padding: int = 0
    bucket: int | None = None
