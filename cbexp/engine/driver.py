"""The synchronous driver: transformers' continuous batching on the caller's thread, reusable over rounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import transformers
from transformers import GenerationConfig

from cbexp.engine.compatibility import check_transformers_version
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.model_support import require_supported_model
from cbexp.engine.requests import RequestLimits
from cbexp.engine.requests import PromptGroup, RequestBook
from cbexp.engine.requests import RequestQueue
from cbexp.engine.settings import check_config, check_count, resolve_decoding
from cbexp.engine.types import CBSyncConfig, Completion, EngineError, StepInfo

if TYPE_CHECKING:
    from cbexp.engine.engine_step import EngineStep


class SyncCBDriver:
    """Generates greedily with the caller's own model object; implements `RolloutDriver`. Not thread-safe.

    Drivers may share a model, one drive at a time: a second one is refused in another thread, and runs inside of the
    first where its `on_step` starts it.

    `model` is a transformers causal language model on one device, bare or inside a PEFT wrapper. Between drives it is
    in the caller's hands, weights included: no keys or values outlive a drive. Of `generation_config` (default: the
    model's own) only `max_new_tokens`, `eos_token_id` and `pad_token_id` count, and `config` goes before it.

    Greedy means what it means to `generate`: the first of the largest logits, and a NaN counts as the largest. Logits
    that are not finite are refused by the self-check alone, which looks at the model once for each batch size, and only
    where steps are compiled, captured or fused.

    Raises at construction: `UnsupportedTransformersError`, `UnsupportedModelError`, `CacheMemoryError`, `EngineError`
    for a setting that is not available yet, `ValueError` for an impossible one, `TypeError` for one of another type.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        config: CBSyncConfig | None = None,
    ) -> None:
        check_transformers_version(transformers.__version__)
        if isinstance(generation_config, CBSyncConfig):
            raise TypeError("SyncCBDriver takes a CBSyncConfig as config=..., the third argument.")
        if generation_config is not None and not isinstance(generation_config, GenerationConfig):
            raise TypeError(
                f"generation_config={generation_config!r} is a {type(generation_config).__name__}: pass a "
                "GenerationConfig, or None for the model's own."
            )
        # Only now: another version may lack the names that this import needs.
        from cbexp.engine.engine_slot import EngineSlot

        self._config = CBSyncConfig() if config is None else config
        check_config(self._config)
        self._model = require_supported_model(model)
        defaults = self._model.generation_config if generation_config is None else generation_config
        self._decoding = resolve_decoding(self._config, defaults, self._model.config.vocab_size)
        self._slot = EngineSlot(self._model, self._config, self._decoding.eos_token_ids)

        if self._config.allow_block_sharing and not self._slot.can_share_blocks:
            warnings.warn(
                f"allow_block_sharing=True has no effect with this {type(self._model).__name__}, which has layers with "
                "a sliding window: their cache cannot be shared.",
                stacklevel=2,
            )

        self._queue = RequestQueue(self._decoding.max_new_tokens, self._decoding.eos_token_ids)
        self._num_steps = 0
        self._steps: list[StepInfo] = []
        self._partial_completions: dict[str, Completion] = {}
        self._is_driving = False
        self._is_closed = False

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values; those of the cache are there once it is built."""
        return {
            "transformers": transformers.__version__,
            "model_class": type(self._model).__name__,
            "attn_implementation": self._config.attn_implementation,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
            "do_sample": False,
            "max_new_tokens": self._decoding.max_new_tokens,
            "eos_token_ids": list(self._decoding.eos_token_ids),
            "pad_token_id": self._decoding.pad_token_id,
            "has_growing_cache": self._config.num_blocks is None,
        } | self._slot.resolved

    @property
    def steps(self) -> list[StepInfo]:
        """Records of the last (or running) drive; a burst of decode steps is one record."""
        return self._steps

    @property
    def compile_stats(self) -> dict[str, Any]:
        """What compiling and capturing came to, as `CompileStats`, what self-checks found, and `device_idle_share`.

        That is the part of drives in which the device waited between bursts and batches of prompts (None: no GPU, or a
        mode without graphs). Empty where every step is one of transformers' own, and before there is a cache.
        """
        return self._slot.compile_stats

    @property
    def partial_completions(self) -> dict[str, Completion]:
        """After an error or interrupt in a drive: all its requests, the unfinished failed with their tokens kept."""
        return self._partial_completions

    def warmup(self) -> None:
        """Compile and capture for every batch size; without `num_blocks` the first drives do so as they go."""
        self._check_usable("warmup")
        self._slot.warmup()

    def time_decode_steps(
        self, batch: int, context: int, num_steps: int, *, num_bursts: int = 7
    ) -> list[float]:
        """Mean seconds of a decode step in each of `num_bursts` bursts of `num_steps`, without prompts or a scheduler.

        Each of `batch` rows, one of the batch sizes, attends to `context` tokens. Raises `EngineError` when the cache
        or the buffers are too small for that, or when there is no cache yet; `TypeError` or `ValueError` for an
        argument that is no int of at least 1.
        """
        self._check_usable("time_decode_steps")
        asked = {"batch": batch, "context": context, "num_steps": num_steps, "num_bursts": num_bursts}
        for name, value in asked.items():
            check_count(name, value)
        return self._slot.time_decode_steps(batch, context, num_steps, num_bursts)

    def add_requests(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] | None = None,
        num_generations: int = 1,
    ) -> list[str]:
        """Queue prompts for the next drive; returns their request ids, the generations of a prompt side by side.

        `max_new_tokens` is one limit or one per prompt. Raises `ValueError`, naming the prompt, for anything that
        cannot be served; nothing is queued then.
        """
        self._check_usable("add_requests")
        return self._queue.add(prompt_ids_list, max_new_tokens, num_generations, self._request_limits())

    def drive_until_empty(self) -> dict[str, Completion]:
        """Run until every queued request has ended; request id -> completion in submission order, every id present.

        A request that the engine failed or lost is there as failed, with its error. An exception on the way, from
        `on_step` or Ctrl-C too, reaches the caller: the drive's requests are dropped, what they had is in
        `partial_completions`, and the driver is ready for the next round. While another thread has the model on loan,
        a drive is an `EngineError`, and its requests stay queued.
        """
        self._check_usable("drive_until_empty")
        # Also while the engine lets go of the model; when another thread has it, what is queued stays so.
        with self._slot.on_loan():
            completions = self._drive_queued()
        self._partial_completions = {}
        return completions

    def close(self) -> None:
        """Free the cache. Safe to call twice; any other use of the driver afterwards is an `EngineError`.

        Ctrl-C takes effect once all is freed, and an exception leaves the rest to the next call: an `EngineError` while
        another thread has the model on loan, for one.
        """
        if self._is_driving:
            raise EngineError("close() was called inside a drive: leave drive_until_empty first.")
        self._is_closed = True
        self._queue.take()
        self._slot.drop()

    def __enter__(self) -> SyncCBDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drive_queued(self) -> dict[str, Completion]:
        groups = self._queue.take()
        self._steps, self._partial_completions = [], {}
        if not groups:
            return {}
        book = RequestBook(groups)
        try:
            with self._driving():
                completions = self._drive(groups, book)
            # Kept until they are in the caller's hands: an interrupt from here on must not lose them.
            self._partial_completions = completions
        except BaseException as error:
            unfinished = self._slot.partial_completions()
            self._partial_completions = book.completions(unfinished, f"{type(error).__name__}: {error}")
            raise
        finally:
            with deferring_interrupts():
                self._slot.reset()
        return completions

    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> dict[str, Completion]:
        engine = self._slot.prepare(groups)
        for group in groups:
            engine.submit(group)
        start_s = time.perf_counter()
        while (step := engine.step(self._model)) is not None:
            end_s = time.perf_counter()
            book.mark_scheduled(step.request_ids, start_s)
            book.mark_tokens(step.token_request_ids, end_s)
            for output in step.outputs:
                book.finish(output.request_id, output.completion_ids, output.error, end_s)
            self._report_step(_step_info(step, start_s, end_s))
            start_s = time.perf_counter()
        return book.completions(engine.partial_completions(), "transformers' scheduler lost the request")

    def _report_step(self, info: StepInfo) -> None:
        index = self._num_steps
        self._num_steps += info.num_steps
        self._steps.append(info)
        if self._config.on_step is not None:
            self._config.on_step(index, info)

    @contextmanager
    def _driving(self) -> Iterator[None]:
        self._is_driving = True
        try:
            with self._slot.borrowed():
                yield
        finally:
            self._is_driving = False

    def _request_limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self._model.config.vocab_size,
            max_positions=getattr(self._model.config, "max_position_embeddings", None),
            max_stored_tokens=self._slot.max_stored_tokens,
        )

    def _check_usable(self, method: str) -> None:
        if self._is_closed:
            raise EngineError(f"{method}() was called on a closed SyncCBDriver: build a new one.")
        if self._is_driving:
            raise EngineError(f"{method}() was called inside a drive: leave drive_until_empty first.")


def _step_info(step: EngineStep, start_s: float, end_s: float) -> StepInfo:
    return StepInfo(
        kind=step.kind,
        num_steps=step.num_steps,
        num_requests=len(step.request_ids),
        num_tokens=step.num_tokens,
        num_padding=step.num_padding,
        bucket=step.bucket,
        start_s=start_s,
        end_s=end_s,
        num_waiting=step.num_waiting,
        num_finished=len(step.outputs),
        cache_used_fraction=step.cache_used_fraction,
    )
