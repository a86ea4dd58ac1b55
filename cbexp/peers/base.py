"""What the peers share: their settings, the queue of checked requests, and the frame of a drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import transformers

from cbexp.engine.compatibility import check_transformers_version
from cbexp.engine.model_support import require_supported_model
from cbexp.engine.prompts import RequestLimits
from cbexp.engine.request_book import PromptGroup, RequestBook
from cbexp.engine.request_queue import RequestQueue
from cbexp.engine.types import Completion, EngineError, StepInfo


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Settings of a peer. `compile_mode` is a name of `compile.mode`; no `eos_token_ids`: limits alone end.

    The fields from `page_size` on describe the manager's paged cache and batches, except
    `max_requests_per_batch`, which is also the batch size of `generate` (None: every request in one batch).
    `page_size` and `max_batch_tokens` are in tokens. `max_request_tokens`: prompt and new tokens of the
    longest request to come, which sizes the manager's block table (None: the longest that cache and model
    admit).
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    compile_mode: str
    max_requests_per_batch: int | None
    page_size: int
    num_blocks: int
    max_batch_tokens: int
    allow_block_sharing: bool
    scheduler: Literal["fifo", "prefill_first"]
    max_request_tokens: int | None = None


class PeerDriver(ABC):
    """A `RolloutDriver` but for `_drive`: queues checked requests, frames drives, knows when it is closed.

    `model` is a transformers causal language model on one device, bare or inside a PEFT wrapper. Raises at
    construction: `UnsupportedTransformersError`, `UnsupportedModelError`, `EngineError` for a compile mode
    that the peer lacks, and `ValueError` for a stop or pad id outside the vocabulary.
    """

    supported_compile_modes: ClassVar[tuple[str, ...]]

    def __init__(self, model: Any, config: PeerConfig) -> None:
        check_transformers_version(transformers.__version__)
        self._check_compile_mode(config.compile_mode)
        self._model = require_supported_model(model)
        self._config = config
        self._check_token_ids()
        self._queue = RequestQueue(self._config.max_new_tokens, self._config.eos_token_ids)
        self._steps: list[StepInfo] = []
        self._unfinished: dict[str, tuple[int, ...]] = {}
        self._partial_completions: dict[str, Completion] = {}
        self._is_driving = False
        self._is_closed = False

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values."""
        return {
            "transformers": transformers.__version__,
            "model_class": type(self._model).__name__,
            "attn_implementation": self._model.config._attn_implementation,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
            "do_sample": False,
            "max_new_tokens": self._config.max_new_tokens,
            "eos_token_ids": list(self._config.eos_token_ids),
            "pad_token_id": self._config.pad_token_id,
        }

    @property
    def steps(self) -> list[StepInfo]:
        """Records of the last (or running) drive's steps; empty where they cannot be seen."""
        return self._steps

    @property
    def compile_stats(self) -> dict[str, Any]:
        """Counts and seconds of compiling and capturing; empty, since transformers does not tell."""
        return {}

    @property
    def partial_completions(self) -> dict[str, Completion]:
        """After an error or interrupt in a drive: its requests, unfinished ones failed, their tokens kept."""
        return self._partial_completions

    def warmup(self) -> None:
        """Build, compile and capture what can be before the first request; here nothing."""
        self._check_usable("warmup")

    def add_requests(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] | None = None,
        num_generations: int = 1,
    ) -> list[str]:
        """Queue prompts for the next drive; returns request ids, the generations of a prompt side by side.

        `max_new_tokens` is one limit or one per prompt. Raises `ValueError`, naming the prompt, for anything
        that cannot be served; nothing is queued then.
        """
        self._check_usable("add_requests")
        return self._queue.add(prompt_ids_list, max_new_tokens, num_generations, self._request_limits())

    def drive_until_empty(self) -> dict[str, Completion]:
        """Run until every queued request has ended; request id -> completion, submission order, all present.

        A request that failed or was lost is there as failed, with its error. An exception on the way, Ctrl-C
        too, reaches the caller: the drive's requests are dropped, what they had is in `partial_completions`,
        and the driver is ready for the next round.
        """
        self._check_usable("drive_until_empty")
        groups = self._queue.take()
        self._steps, self._unfinished, self._partial_completions = [], {}, {}
        if not groups:
            return {}
        book = RequestBook(groups)
        self._is_driving = True
        try:
            self._drive(groups, book)
        except BaseException as error:
            self._partial_completions = book.completions(self._unfinished, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._is_driving = False
        return book.completions({}, "transformers lost the request")

    def close(self) -> None:
        """Free what the driver holds; the model is already as it was. Safe to call twice."""
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
        """Serve `groups` and record them in `book`; on an exception leave partial tokens in `_unfinished`."""

    def _request_limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self._model.config.vocab_size,
            max_positions=getattr(self._model.config, "max_position_embeddings", None),
            max_stored_tokens=None,
        )

    def _check_compile_mode(self, mode: str) -> None:
        if mode not in self.supported_compile_modes:
            allowed = ", ".join(self.supported_compile_modes)
            raise EngineError(f"{type(self).__name__} has no compile mode {mode!r}: use {allowed}.")

    def _check_token_ids(self) -> None:
        vocab_size = self._model.config.vocab_size
        for name, ids in (("eos", self._config.eos_token_ids), ("pad", (self._config.pad_token_id,))):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{name} token id {token_id} is not one of this model's, 0 to {vocab_size - 1}."
                    )

    def _check_usable(self, method: str) -> None:
        name = type(self).__name__
        if self._is_closed:
            raise EngineError(f"{method}() was called on a closed {name}: build a new one.")
        if self._is_driving:
            raise EngineError(f"{method}() was called inside a drive: leave drive_until_empty first.")
