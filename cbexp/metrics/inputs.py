"""What the metrics read of a driver's completions and steps; the drivers' own types fit by shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TimingsLike(Protocol):
    """Host times of a request on one clock; None where the request did not get that far."""

    @property
    def submitted_s(self) -> float:
        """When the request was handed to the driver."""

    @property
    def scheduled_s(self) -> float | None:
        """When its first tokens went into a step."""

    @property
    def first_token_s(self) -> float | None:
        """When its first new token was known to the host."""

    @property
    def finished_s(self) -> float | None:
        """When its last token was."""


class CompletionLike(Protocol):
    """What a driver returns for a request."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the prompt."""

    @property
    def completion_ids(self) -> Sequence[int]:
        """Token ids generated, EOS included."""

    @property
    def finish_reason(self) -> str:
        """One of eos, length, failed."""

    @property
    def timings(self) -> TimingsLike:
        """When the request reached its stages."""

    @property
    def error(self) -> str | None:
        """Why it failed."""


class StepLike(Protocol):
    """What a driver tells of a step; a burst covers `num_steps` decode steps."""

    @property
    def kind(self) -> str:
        """One of prefill, mixed, decode."""

    @property
    def num_steps(self) -> int:
        """Model forwards that it covers."""

    @property
    def num_requests(self) -> int:
        """Requests in its batch."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed, prompt tokens among them, padding not."""

    @property
    def num_padding(self) -> int:
        """Padded rows or tokens computed."""

    @property
    def bucket(self) -> int | None:
        """The padded batch size; None for a natural one."""

    @property
    def start_s(self) -> float:
        """Start on the clock of the round."""

    @property
    def end_s(self) -> float:
        """End on the clock of the round."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission after it."""

    @property
    def num_finished(self) -> int:
        """Requests that ended in it."""

    @property
    def cache_used_fraction(self) -> float:
        """Share of the cache in use at its start."""
