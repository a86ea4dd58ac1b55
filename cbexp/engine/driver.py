"""The synchronous driver: transformers' continuous batching on the caller's thread, reusable over rounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from cbexp.engine.borrow import Borrow, borrowed_for_inference, exclusive_use, read_versions
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.model_driver import ModelDriver
from cbexp.engine.probe import require_own_forward
from cbexp.engine.requests import GroupLengths, PromptGroup, RequestBook, RequestLimits, check_sampling
from cbexp.engine.row_sampling import DriveSampling
from cbexp.engine.sampling import HeadInputs
from cbexp.engine.scoring import ScoredGroup, group_completions
from cbexp.engine.settings import check_config, check_count, check_device
from cbexp.engine.shadow import Shadow
from cbexp.engine.sizing import (
    CacheNeed,
    CacheSize,
    choose_safety_margin,
    describe_shortage,
    free_memory_bytes,
    measure_need,
    size_cache,
)
from cbexp.engine.support import list_wrappers
from cbexp.engine.types import CacheMemoryError, CBSyncConfig, EngineError, Sampling, Scores, StepInfo

if TYPE_CHECKING:
    from cbexp.engine.decode import Decoder, DecodeRecord
    from cbexp.engine.forward import Forward
    from cbexp.engine.upstream import Batcher


class SyncCBDriver(ModelDriver):
    """Generates with the caller's own model object; implements `RolloutDriver`. Not thread-safe.

    Drivers may share a model, one drive at a time. A drive that another thread starts meanwhile is refused, with its
    requests still queued. A drive that the first one's `on_step` starts runs at once, inside of it.

    `model` is a transformers causal language model on one device, bare or in wrappers that `list_wrappers` takes off.
    Between drives and in `on_step` it is in the caller's hands, weights included: no keys or values outlive a drive.
    Float32 weights whose owner computes under autocast are copied to its dtype in each drive, see `Shadow`.

    Of `generation_config`, `max_new_tokens`, `eos_token_id` and `pad_token_id` count, and `config` goes before it.
    Whatever else it sets is refused, unless it changes nothing. EOS and pad that neither of them sets are those of the
    model's own generation config, as they are now. What else that sets does not apply, and `resolved` names it in
    `unused_model_defaults`.

    Tokens are chosen as `sampling.choose` says. Logits that are not finite are refused by the self-check alone, which
    looks at the model once for each batch size, and only where steps are compiled, captured or fused.

    Raises at construction: `UnsupportedTransformersError`, `UnsupportedModelError`, `CacheMemoryError`, `EngineError`
    for a setting that is not available, `ValueError` for an impossible one, `TypeError` for one of another type.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        config: CBSyncConfig | None = None,
        tokenizer: Any = None,
    ) -> None:
        if isinstance(generation_config, CBSyncConfig):
            raise TypeError("SyncCBDriver takes a CBSyncConfig as config=..., the third argument.")
        if generation_config is not None and not isinstance(generation_config, GenerationConfig):
            raise TypeError(
                f"generation_config={generation_config!r} is a {type(generation_config).__name__}: pass a "
                "GenerationConfig, or None."
            )
        config = CBSyncConfig() if config is None else config
        check_config(config)
        super().__init__(model, config, generation_config, tokenizer)
        # Only now that its version is known: another may lack the names that this import needs.
        from cbexp.engine import upstream
        from cbexp.engine.forward import resolve_fusion

        upstream.check_attention(self._model.config, self._config)
        check_device(self._config, self._model.device.type)
        self._attention = upstream.attention_name(self._config)
        self._shadow = Shadow(self._model, list_wrappers(model))
        with self._borrowed():
            resolve_fusion(self._model, self._config.fusion)
        self._num_steps = 0
        self._is_version_new = False  # named in `on_step`
        self._record: DecodeRecord | None = None  # of all decoders, from the first one on
        self._most_blocks_short = 0  # of what was warned of
        own = self._model.config._attn_implementation
        # With `num_blocks` set it is built at once and stays; else a drive may ask for a larger one.
        self._engine: _Engine | None = None
        require_own_forward(
            self._model,
            self._config,
            self._request_limits(),
            own if upstream.reads_paged_cache(self._model.config) else None,
            self._generate_apart,
            self._shadow,
        )
        if self._config.num_blocks is not None:
            longest = GroupLengths(self._config.num_blocks * self._config.page_size, 1, 1)
            with self._borrowed():
                self._engine = self._build(self._measure([longest]))
        if self._config.allow_block_sharing and not upstream.can_share_blocks(self._model.config):
            warnings.warn(
                f"allow_block_sharing=True has no effect with this {type(self._model).__name__}, which has layers with "
                "a sliding window: their cache cannot be shared.",
                stacklevel=2,
            )

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values; those of the cache are there once it is built."""
        settings = super().resolved | {
            "attn_implementation": self._config.attn_implementation,
            "has_growing_cache": self._config.num_blocks is None,
        }
        if self._shadow.dtype is not None:
            settings |= self._shadow.describe()
        if self._config.num_blocks is None:
            settings["max_memory_fraction"] = self._config.max_memory_fraction
        if self._engine is None:
            return settings
        return settings | self._engine.batcher.describe() | self._engine.decoder.describe()

    @property
    def compile_stats(self) -> dict[str, Any]:
        """As `DecodeRecord.summarize`, over the driver's whole life; after `close`, too.

        Empty where every step is one of transformers' own, and before there is a cache.
        """
        return {} if self._record is None else self._record.summarize()

    def warmup(self) -> None:
        """Compile and capture for every batch size; without `num_blocks` the first drives do so as they go."""
        super().warmup()
        if self._engine is not None:
            with self._begun(self._engine):
                self._engine.decoder.prepare()

    def time_decode_steps(
        self, batch: int, context: int, num_steps: int, *, num_bursts: int = 7
    ) -> list[float]:
        """Mean seconds of a decode step in each of `num_bursts` bursts of `num_steps`, without prompts or a scheduler.

        Each of `batch` rows, one of the batch sizes, attends to `context` tokens. Raises `EngineError` when the cache,
        the buffers or the model's positions are too few for that, or when there is no cache yet; `TypeError` or
        `ValueError` for an argument that is no int of at least 1.
        """
        self._check_usable("time_decode_steps")
        asked = {"batch": batch, "context": context, "num_steps": num_steps, "num_bursts": num_bursts}
        for name, value in asked.items():
            check_count(name, value)
        if self._engine is None:
            raise EngineError("Decode steps alone can be timed once the cache is built: set num_blocks.")
        with self._begun(self._engine):
            return self._engine.decoder.time_steps(batch, context, num_steps, num_bursts)

    def weights_changed(self, version: int | None = None) -> None:
        """Name the policy that the weights are from now on: `version`, None for the next number.

        Completions say which version made which of their tokens. Between drives this is all, since no keys or values
        outlive a drive. In `on_step` it has all requests under way read again, whatever they have generated included,
        before they go on: their keys and values are of the old weights. Parameters that were written in `on_step`
        without a word are noticed by their version counters, and taken for the next version; writes through `.data` are
        not seen there.
        """
        if self._is_closed:
            raise EngineError(
                f"weights_changed() was called on a closed {type(self).__name__}: build a new one."
            )
        if version is not None and type(version) is not int:
            raise TypeError(f"version={version!r} must be a whole number, or None.")
        self._version = self._version + 1 if version is None else version
        self._is_version_new = True

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        temperature: float | None = None,
    ) -> list[Scores]:
        """The log-probabilities of given completions under the model as it is now, in their order; no token is made.

        `completions[i]` continues `prompts[i]`, and may be empty. Adjacent equal prompts are read once.
        `logprobs_model` is at `temperature` (None: that of the driver's sampling), where 0 counts as 1. A model in
        another state, with its adapter off for one, leaves what was compiled and captured valid. Queued requests wait.

        Raises `ValueError`, by index, for what cannot be scored; `CacheMemoryError` and `EngineError` as a drive does.
        """
        self._check_usable("score")
        limits = self._request_limits()
        if temperature is None:
            temperature = self._decoding.sampling.temperature
        check_sampling("score", Sampling(temperature), limits.vocab_size, limits.reads_text)
        groups = group_completions(prompts, completions, limits)
        scores = self._score(groups, temperature) if groups else {}
        return [scores.get(index, Scores((), ())) for index in range(len(prompts))]

    def sleep(self) -> None:
        """Let others have the memory of the cache and of copied weights, which come back at their addresses.

        What was captured or compiled stays valid.

        Whatever needs the cache wakes the driver by itself. Harmless when it sleeps, or has no cache yet.
        """
        self._check_usable("sleep")
        self._give_up_memory()

    def wake(self) -> None:
        """Have the memory back after `sleep`, ahead of the drive that would wake the driver; harmless when it is awake.

        Raises `CacheMemoryError` when the device has no room for it; the driver sleeps on then.
        """
        self._check_usable("wake")
        self._wake()

    def close(self) -> None:
        """Free cache, graphs and copies of weights. Safe to call twice; any other use afterwards is an `EngineError`.

        Ctrl-C takes effect once all is freed, and an exception leaves the rest to the next call: an `EngineError` while
        another thread uses the model, for one.
        """
        super().close()
        self._shadow.release()
        self._drop()

    def _holding_model(self) -> AbstractContextManager[None]:
        return exclusive_use(self._model)

    def _give_up_memory(self) -> None:
        with deferring_interrupts():
            if self._engine is not None:
                self._engine.batcher.give_up_memory()
            self._shadow.give_up()

    def _wake(self) -> None:
        """Have all memory that was given up, or none of it."""
        with deferring_interrupts():
            try:
                if self._engine is not None:
                    self._engine.batcher.take_memory_back()
                self._shadow.take_back()
            except CacheMemoryError as error:
                self._give_up_memory()
                raise CacheMemoryError(
                    f"{error} The driver still sleeps: free memory there, and wake it again."
                ) from error

    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> None:
        with self._borrowed() as borrow:
            need = self._measure([group.lengths for group in groups])
            engine = self._engine = self._engine_for(need)
            self._wake()
            margin = choose_safety_margin(need.num_blocks, engine.batcher.num_blocks)
            sampling = self._sampling_of(groups)
            engine.batcher.begin(book, sampling, margin, engine.decoder.max_rows)
            try:
                with engine.batcher.on_stream():
                    engine.decoder.begin(sampling)
                for group in groups:
                    engine.batcher.submit(group)
                while (step := _run_step(engine)) is not None:
                    self._report_step(step, engine, borrow)
            finally:
                with deferring_interrupts():
                    self._unfinished = engine.batcher.partial_completions()
                    engine.reset()

    def _score(self, groups: list[ScoredGroup], temperature: float) -> dict[int, Scores]:
        with self._borrowed():
            need = self._measure([group.lengths for group in groups])
            engine = self._engine
            # A cache that is too small for all at once does: one that were built anew would cost graphs.
            if engine is None or not engine.batcher.suits(self._model) or not engine.size.holds_longest(need):
                engine = self._engine = self._engine_for(need)
            self._wake()
            margin = choose_safety_margin(need.num_blocks, engine.batcher.num_blocks)
            try:
                with engine.batcher.on_stream(), engine.decoder.reading() as forward:
                    return engine.batcher.score(groups, forward, temperature, margin, engine.decoder.max_rows)
            finally:
                with deferring_interrupts():
                    engine.reset()

    def _report_step(self, info: StepInfo, engine: _Engine, borrow: Borrow) -> None:
        """Record a step, and call `on_step`, during which the model is in the caller's hands."""
        index = self._num_steps
        self._num_steps += info.num_steps
        self._steps.append(info)
        if self._config.on_step is None:
            return
        engine.decoder.end()
        self._is_version_new = False
        with borrow.given_back():
            before = read_versions(self._model)
            self._config.on_step(index, info)
            if not self._is_version_new and read_versions(self._model) != before:
                self.weights_changed()
        if not engine.batcher.suits(self._model):
            raise EngineError(
                f"on_step has left the model on {self._model.device} in {self._model.dtype}: a drive ends on the "
                "device, in the dtype and with the positions that it began with."
            )
        if self._is_version_new:
            with deferring_interrupts():
                engine.batcher.recompute(self._version)
        with engine.batcher.on_stream():
            engine.decoder.resume()

    def _request_limits(self) -> RequestLimits:
        limits = super()._request_limits()
        if self._engine is None or self._config.num_blocks is None:
            return limits
        return replace(limits, max_stored_tokens=self._engine.batcher.max_request_tokens)

    def _borrowed(self) -> AbstractContextManager[Borrow]:
        return borrowed_for_inference(self._model, self._attention, self._shadow)

    @contextmanager
    def _begun(self, engine: _Engine) -> Iterator[None]:
        """Let the engine have the model for the body, without requests."""
        with self._borrowed():
            if not engine.batcher.suits(self._model):
                raise EngineError(
                    "The cache is of another dtype, device or length than the model is now, under its autocast "
                    f"({self._model.dtype}, {self._model.device}): a drive builds it anew."
                )
            self._wake()
            try:
                with engine.batcher.on_stream():
                    engine.decoder.begin(self._sampling_of(()))
                    yield
            finally:
                with deferring_interrupts():
                    engine.reset()

    def _sampling_of(self, groups: Sequence[PromptGroup]) -> DriveSampling:
        config = self._config
        return DriveSampling(
            groups,
            config.seed,
            self._model.config.vocab_size,
            default=self._decoding.sampling,
            logprobs=config.logprobs,
            fp32_head=config.fp32_head,
        )

    def _measure(self, groups: list[GroupLengths]) -> CacheNeed:
        return measure_need(groups, self._model.config, self._config)

    def _engine_for(self, need: CacheNeed) -> _Engine:
        """The engine, built anew where the model has moved, or where its size is open, too small, and more fits now."""
        engine = self._engine
        if engine is None or not engine.batcher.suits(self._model):
            self._drop()
            return self._build(need)
        if self._config.num_blocks is not None or engine.size.suits(need):
            return engine
        could_be = self._size(need, held_bytes=engine.batcher.held_bytes, present=engine.size)
        if engine.size.gives_way_to(could_be, need):
            self._drop()
            return self._build(need)
        self._warn_of_shortage(need, engine.size)
        return engine

    def _build(self, need: CacheNeed) -> _Engine:
        """The model is borrowed, here and in `_engine_for`: a cache is in the dtype that runs."""
        size = self._size(need)
        self._warn_of_shortage(need, size)
        engine = _build_engine(
            self._model, self._config, size, self._decoding.eos_token_ids, self._record, self._tokenizer
        )
        self._record = engine.decoder.record
        return engine

    def _size(self, need: CacheNeed, held_bytes: int = 0, present: CacheSize | None = None) -> CacheSize:
        """What there may be if `held_bytes` were free too; else `present`, where it holds the longest request."""
        model, free_bytes = self._model, free_memory_bytes(self._model.device) + held_bytes
        try:
            return size_cache(need, model.config, model.dtype, self._config, free_bytes)
        except CacheMemoryError:
            if present is None or not present.holds_longest(need):
                raise
            return present

    def _warn_of_shortage(self, need: CacheNeed, size: CacheSize) -> None:
        """Once for each larger need."""
        shortage = describe_shortage(need, size, self._config)
        if shortage is not None and need.num_blocks > self._most_blocks_short:
            self._most_blocks_short = need.num_blocks
            warnings.warn(shortage, stacklevel=2)

    def _drop(self) -> None:
        """Free the engine's memory. After an exception, out of memory for one, a further call does what is left.

        Raises `EngineError` while another thread uses the model, whose weights would move under its graphs.
        """
        if self._engine is not None:
            with exclusive_use(self._model), deferring_interrupts():
                self._engine.close()
                self._engine = None

    def _generate_apart(self, settings: CBSyncConfig, groups: list[PromptGroup]) -> list[tuple[int, ...]]:
        """The tokens of each prompt and what it is continued with, on an engine of its own for these prompts."""
        from cbexp.engine import upstream

        model, book = self._model, RequestBook(groups)
        need = measure_need([group.lengths for group in groups], model.config, settings)
        size = CacheSize(need.num_blocks, need.batch_tokens, len(groups))
        with borrowed_for_inference(model, upstream.attention_name(settings), self._shadow):
            engine = _build_engine(model, settings, size, ())
            try:
                sampling = DriveSampling(groups, seed=0, vocab_size=model.config.vocab_size)
                engine.batcher.begin(book, sampling, safety_margin=0.0, num_slots=len(groups))
                with engine.batcher.on_stream():
                    engine.decoder.begin(sampling)
                for group in groups:
                    engine.batcher.submit(group)
                while _run_step(engine) is not None:
                    pass
            finally:
                engine.close()
        completions = list(book.completions({}, self.lost_error).values())
        for error in filter(None, (completion.error for completion in completions)):
            raise RuntimeError(error)
        return [completion.prompt_ids + completion.completion_ids for completion in completions]


@dataclass
class _Engine:
    """A cache with its scheduler, and what decodes on it."""

    batcher: Batcher
    decoder: Decoder | _UpstreamSteps
    size: CacheSize

    def reset(self) -> None:
        """Forget all requests, and give the model's modules back."""
        self.batcher.wait_for_device()
        self.decoder.end()
        self.batcher.reset()

    def close(self) -> None:
        """Free graphs and cache."""
        self.batcher.wait_for_device()
        self.decoder.close()
        del self.decoder  # its buffers are on the cache, whose memory the batcher gives back to the device
        self.batcher.close()


class _UpstreamSteps:
    """Stands in for `Decoder` where the model keeps its own attention: every step is one of transformers' own."""

    record = None

    def __init__(self, forward: Forward, max_rows: int) -> None:
        self._forward = forward
        self.max_rows = max_rows

    def begin(self, sampling: DriveSampling) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...
    def prepare(self) -> None: ...
    def close(self) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}

    def timing_batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor | HeadInputs:
        return self._forward.prefill(batch, num_rows)

    def reading(self) -> AbstractContextManager[Forward]:
        return nullcontext(self._forward)

    def time_steps(self, *_asked: int) -> list[float]:
        raise EngineError("Decode steps alone can be timed with attn_implementation='cbexp' only.")


def _build_engine(
    model: PreTrainedModel,
    config: CBSyncConfig,
    size: CacheSize,
    eos_token_ids: tuple[int, ...],
    record: DecodeRecord | None = None,
    tokenizer: Any = None,
) -> _Engine:
    from cbexp.engine.decode import Decoder
    from cbexp.engine.forward import PlainForward
    from cbexp.engine.upstream import Batcher

    settings = replace(
        config,
        num_blocks=size.num_blocks,
        max_batch_tokens=size.max_batch_tokens,
        max_requests_per_batch=size.max_requests_per_batch,
    )
    batcher = Batcher(model, settings, tokenizer)
    if not settings.has_engine_attention:
        return _Engine(batcher, _UpstreamSteps(PlainForward(model, ()), size.max_requests_per_batch), size)
    with batcher.on_stream():
        decoder = Decoder(model, batcher.page_pools(), settings, eos_token_ids, batcher.max_positions, record)
    return _Engine(batcher, decoder, size)


def _run_step(engine: _Engine) -> StepInfo | None:
    """Run and account for one batch or burst; None when there is nothing to run. Waits for the device.

    Prompts go first; then what decodes runs in a burst; a cache that is too full for one step of all its rows takes an
    ordinary step of transformers', which evicts.
    """
    batcher, decoder, start_s = engine.batcher, engine.decoder, time.perf_counter()
    with batcher.on_stream():
        if isinstance(decoder, _UpstreamSteps):
            return batcher.run_batch(decoder, "upstream", start_s)
        step = batcher.run_prefill(decoder, start_s)
        if step is not None:
            return step
        burst = batcher.open_burst(decoder.max_rows, decoder.choose_burst_length)
        if burst is None:
            return batcher.run_batch(decoder, "closed", start_s)
        made = decoder.run(burst.rows, burst.num_steps)
        return batcher.close_burst(burst, made, decoder.size_for(len(burst.rows)), start_s)
