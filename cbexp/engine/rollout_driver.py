"""What every driver offers, and the frame of a drive: checked requests in a queue, a driver usable after errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, ClassVar, Self

from cbexp.engine.requests import PromptGroup, RequestBook, RequestLimits, RequestQueue
from cbexp.engine.types import GREEDY, Completion, EngineError, Sampling, StepInfo


class RolloutDriver(ABC):
    """Generates completions of prompts, round after round. Not thread-safe; as a context manager it closes itself.

    A driver implements `resolved`, `_drive` and `_request_limits`. `lost_error` is the error of a request that
    had not ended when its drive did.
    """

    lost_error: ClassVar[str]

    def __init__(
        self, max_new_tokens: int | None, eos_token_ids: tuple[int, ...], sampling: Sampling = GREEDY
    ) -> None:
        self._queue = RequestQueue(max_new_tokens, eos_token_ids, sampling)
        self._steps: list[StepInfo] = []
        # Request id -> tokens so far, of requests that a drive has not finished.
        self._unfinished: dict[str, tuple[int, ...]] = {}
        self._partial_completions: dict[str, Completion] = {}
        self._is_driving = False
        self._is_closed = False
        self._version = 0  # of the policy

    @property
    @abstractmethod
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values."""

    @property
    def steps(self) -> list[StepInfo]:
        """Records of the last (or running) drive's steps; empty where they cannot be seen."""
        return self._steps

    @property
    def compile_stats(self) -> dict[str, Any]:
        """Counts and seconds of compiling and capturing; empty where they are not known."""
        return {}

    @property
    def partial_completions(self) -> dict[str, Completion]:
        """After an error or interrupt in a drive: all its requests, unfinished ones failed, their tokens kept."""
        return self._partial_completions

    def warmup(self) -> None:
        """Build, compile and capture what can be before the first request."""
        self._check_usable("warmup")

    def add_requests(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] | None = None,
        num_generations: int = 1,
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[str]:
        """Queue prompts for the next drive; returns their request ids, the generations of a prompt side by side.

        `max_new_tokens` and `sampling` are one for all or one per prompt; None: the driver's. Raises `ValueError`,
        naming the prompt, for anything that cannot be served; nothing is queued then.
        """
        self._check_usable("add_requests")
        return self._queue.add(
            prompt_ids_list, max_new_tokens, num_generations, sampling, self._request_limits()
        )

    def drive_until_empty(self) -> dict[str, Completion]:
        """Run until every queued request has ended; request id -> completion in submission order, every id present.

        A request that failed or was lost is there as failed, with its error. An exception on the way, from `on_step` or
        Ctrl-C too, reaches the caller: the drive's requests are dropped, what they had is in `partial_completions`, and
        the driver is ready for the next round.
        """
        self._check_usable("drive_until_empty")
        with self._holding_model():
            groups = self._queue.take()
            self._steps, self._unfinished, self._partial_completions = [], {}, {}
            book = RequestBook(groups, self._version)
            try:
                self._is_driving = True
                if groups:
                    self._drive(groups, book)
                # Kept until they are in the caller's hands: an interrupt from here on must not lose them.
                self._partial_completions = book.completions(self._unfinished, self.lost_error)
            except BaseException as error:
                self._partial_completions = book.completions(
                    self._unfinished, f"{type(error).__name__}: {error}"
                )
                raise
            finally:
                self._is_driving = False
        completions, self._partial_completions = self._partial_completions, {}
        return completions

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps, so that the rollouts after it are those that would have followed."""
        return {"num_submissions": self._queue.num_submissions}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken; the random numbers of what is queued already stay as they are."""
        self._check_usable("load_state_dict")
        number = state.get("num_submissions") if isinstance(state, Mapping) else None
        if type(number) is not int or number < 0:
            raise ValueError(
                f"state={state!r} is not from state_dict(): it has num_submissions, a whole number."
            )
        self._queue.num_submissions = number

    def close(self) -> None:
        """Free what the driver holds; the model is as it was. Safe to call twice; any other use then is an error."""
        if self._is_driving:
            raise EngineError("close() was called inside a drive: leave drive_until_empty first.")
        self._is_closed = True
        self._queue.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> None:
        """Serve `groups` and record them in `book`; tokens of those that did not end go to `_unfinished`."""

    @abstractmethod
    def _request_limits(self) -> RequestLimits:
        """What a request may not exceed."""

    def _holding_model(self) -> AbstractContextManager[None]:
        """Around a whole drive; what it raises leaves the requests queued."""
        return nullcontext()

    def _check_usable(self, method: str) -> None:
        name = type(self).__name__
        if self._is_closed:
            raise EngineError(f"{method}() was called on a closed {name}: build a new one.")
        if self._is_driving:
            raise EngineError(f"{method}() was called inside a drive: leave drive_until_empty first.")
