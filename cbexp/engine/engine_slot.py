"""Holds the driver's paged engine: builds it, replaces it by a larger one when its size is open, drops it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.batch_shapes import build_batch_shapes
from cbexp.engine.borrow import borrowed_for_inference, on_loan
from cbexp.engine.cb_internals import (
    EngineSettings,
    can_share_blocks,
    require_paged_attention,
    require_paged_layers,
    sector_slack_blocks,
)
from cbexp.engine.decoder import DecodeSettings
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.paged_engine import PagedEngine
from cbexp.engine.probe import probe_paged_forward
from cbexp.engine.requests import PromptGroup
from cbexp.engine.settings import check_device, compile_mode_name
from cbexp.engine.sizing import (
    add_spare_blocks,
    choose_safety_margin,
    count_blocks_needed,
    resolve_max_requests,
)
from cbexp.engine.types import CBSyncConfig, EngineError


class EngineSlot:
    """At most one engine. With `num_blocks` set it is built at once and stays; else a round may ask for a larger one.

    Raises `UnsupportedModelError` for a model whose layers, attention implementation or forward a paged cache does not
    serve, and `CacheMemoryError` for a cache that does not fit.
    """

    def __init__(self, model: PreTrainedModel, config: CBSyncConfig, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._attention = resolve_attention(model.config, config)
        check_device(config, model.device.type)
        self._slack_blocks = sector_slack_blocks(model.config)
        with self.borrowed():
            probe_paged_forward(model, config, self._attention, num_blocks=1 + self._slack_blocks)
        self._engine = None if config.num_blocks is None else self._build(config.num_blocks)

    @property
    def can_share_blocks(self) -> bool:
        """Whether `allow_block_sharing` has an effect on this model."""
        return can_share_blocks(self._model.config)

    @property
    def max_stored_tokens(self) -> int | None:
        """Tokens of one request that the cache holds at most; None when it may grow or holds requests of any length."""
        if self._engine is None or self._config.num_blocks is None:
            return None
        return self._engine.max_request_tokens

    @property
    def resolved(self) -> dict[str, Any]:
        """The engine's settings as they run; empty before it is built."""
        return {} if self._engine is None else self._engine.resolved

    @property
    def compile_stats(self) -> dict[str, Any]:
        """The engine's; empty before it is built."""
        return {} if self._engine is None else self._engine.compile_stats

    def borrowed(self) -> AbstractContextManager[None]:
        """Lends the model to the engine for the body; see `borrowed_for_inference`."""
        return borrowed_for_inference(self._model, self._attention)

    def on_loan(self) -> AbstractContextManager[None]:
        """Keeps other threads from borrowing the model during the body; `EngineError` when one has it."""
        return on_loan(self._model)

    def warmup(self) -> None:
        """Compile and capture, where the engine's size is known; otherwise its first drive does as it goes."""
        if self._engine is not None:
            with self._begun(self._engine):
                self._engine.prepare()

    def time_decode_steps(self, batch: int, context: int, num_steps: int, num_bursts: int) -> list[float]:
        """As the engine's; raises `EngineError` when there is none yet."""
        if self._engine is None:
            raise EngineError("Decode steps alone can be timed once the cache is built: set num_blocks.")
        with self._begun(self._engine):
            return self._engine.time_decode_steps(batch, context, num_steps, num_bursts)

    def prepare(self, groups: Sequence[PromptGroup]) -> PagedEngine:
        """The engine for a round: large enough when its size is open, its safety margin set by how crowded it is.

        It has the model until `reset`.
        """
        needed = count_blocks_needed(groups, self._config.page_size, self._slack_blocks)
        engine = self._engine
        is_too_small = engine is not None and self._config.num_blocks is None and engine.num_blocks < needed
        if engine is None or is_too_small or not engine.suits(self._model):
            self.drop()
            num_blocks = add_spare_blocks(needed, self._config)
            engine = self._engine = self._build(self._config.num_blocks or num_blocks)
        engine.begin()
        engine.set_safety_margin(choose_safety_margin(needed, engine.num_blocks))
        return engine

    def partial_completions(self) -> dict[str, tuple[int, ...]]:
        """Request id -> tokens so far, of the requests in the engine."""
        return {} if self._engine is None else self._engine.partial_completions()

    def reset(self) -> None:
        """Forget the engine's requests and free its blocks."""
        if self._engine is not None:
            self._engine.reset()

    def drop(self) -> None:
        """Free the engine's memory. After an exception, out of memory for one, a further call does what is left.

        Raises `EngineError` while another thread has the model, whose weights would move under its graphs.
        """
        if self._engine is not None:
            with self.on_loan(), deferring_interrupts():
                self._engine.close()
                self._engine = None

    @contextmanager
    def _begun(self, engine: PagedEngine) -> Iterator[None]:
        with self.borrowed():
            try:
                engine.begin()
                yield
            finally:
                with deferring_interrupts():
                    engine.reset()

    def _build(self, num_blocks: int) -> PagedEngine:
        config = self._config
        max_requests = resolve_max_requests(
            config.max_requests_per_batch, config.buckets, num_blocks, config.max_batch_tokens
        )
        settings = EngineSettings(
            page_size=config.page_size,
            num_blocks=num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_requests_per_batch=max_requests,
            allow_block_sharing=config.allow_block_sharing,
            scheduler=config.scheduler,
            attn_implementation=self._attention,
        )
        with self.borrowed():
            return PagedEngine(self._model, settings, self._decode_settings(max_requests))

    def _decode_settings(self, max_requests: int) -> DecodeSettings | None:
        config = self._config
        if not config.has_engine_attention:
            return None
        return DecodeSettings(
            shapes=build_batch_shapes(config.batch_shape, config.buckets, max_requests),
            max_burst=config.max_burst,
            eos_token_ids=self._eos_token_ids,
            mode=compile_mode_name(config),
            region=config.compile_region,
            recompile_limit=config.recompile_limit,
            fusion=config.fusion,
            self_check=config.self_check,
        )


def resolve_attention(model_config: PreTrainedConfig, config: CBSyncConfig) -> str:
    """The attention that runs, by the name that transformers knows.

    Raises `UnsupportedModelError` for layers or an implementation that a paged cache does not serve, `EngineError` for
    an implementation other than the model's own.
    """
    require_paged_layers(model_config)
    if config.has_engine_attention:
        return ATTENTION_NAME
    own = model_config._attn_implementation
    if config.attn_implementation != own:
        raise EngineError(
            f"attn_implementation={config.attn_implementation!r} is neither the engine's own ('cbexp') nor what the "
            f"model was loaded with ({own!r}): load the model with it."
        )
    require_paged_attention(model_config)
    return str(own)
