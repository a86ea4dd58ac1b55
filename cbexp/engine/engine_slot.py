"""Holds the driver's paged engine: builds it, replaces it by a larger one when its size is open, drops it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.cb_internals import EngineSettings, require_paged_attention, sector_slack_blocks
from cbexp.engine.paged_engine import PagedEngine
from cbexp.engine.probe import probe_paged_forward
from cbexp.engine.request_book import PromptGroup
from cbexp.engine.sizing import choose_safety_margin, count_blocks_needed
from cbexp.engine.types import CBSyncConfig


class EngineSlot:
    """At most one engine. With `num_blocks` set it is built at once and stays; else a round may ask for a larger one.

    Raises `UnsupportedModelError` for a model whose layers, attention implementation or forward a paged cache does not
    serve, and `CacheMemoryError` for a cache that does not fit.
    """

    def __init__(self, model: PreTrainedModel, config: CBSyncConfig) -> None:
        require_paged_attention(model.config)
        self._model = model
        self._config = config
        self._slack_blocks = sector_slack_blocks(model.config)
        with borrowed_for_inference(model, model.device):
            probe_paged_forward(model, config, num_blocks=1 + self._slack_blocks)
        self._engine = None if config.num_blocks is None else self._build(config.num_blocks)

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

    def prepare(self, groups: Sequence[PromptGroup]) -> PagedEngine:
        """The engine for a round: large enough when its size is open, its safety margin set by how crowded it is."""
        needed = count_blocks_needed(groups, self._config.page_size, self._slack_blocks)
        engine = self._engine
        if engine is None or (self._config.num_blocks is None and engine.num_blocks < needed):
            self.drop()
            engine = self._engine = self._build(needed)
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
        """Free the engine's memory."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _build(self, num_blocks: int) -> PagedEngine:
        config = self._config
        # A request that decodes has a page of its own, so no more of them than blocks are ever active.
        max_requests = num_blocks if config.max_requests_per_batch is None else config.max_requests_per_batch
        settings = EngineSettings(
            page_size=config.page_size,
            num_blocks=num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_requests_per_batch=min(max_requests, config.max_batch_tokens),
            allow_block_sharing=config.allow_block_sharing,
            scheduler=config.scheduler,
        )
        with borrowed_for_inference(self._model, self._model.device):
            return PagedEngine(self._model, settings)
