"""What the peers that run transformers' own generation share: their settings, and the checks of model and ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import transformers

from cbexp.engine.support import check_transformers_version
from cbexp.engine.support import require_supported_model
from cbexp.engine.requests import RequestLimits
from cbexp.engine.types import EngineError
from cbexp.peers.queued_driver import QueuedDriver


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


class PeerDriver(QueuedDriver):
    """A `QueuedDriver` on a model of ours.

    `model` is a transformers causal language model on one device, bare or inside a PEFT wrapper. Raises at
    construction: `UnsupportedTransformersError`, `UnsupportedModelError`, `EngineError` for a compile mode
    that the peer lacks, and `ValueError` for a stop or pad id outside the vocabulary.
    """

    lost_error = "transformers lost the request"
    supported_compile_modes: ClassVar[tuple[str, ...]]

    def __init__(self, model: Any, config: PeerConfig) -> None:
        check_transformers_version(transformers.__version__)
        self._check_compile_mode(config.compile_mode)
        self._model = require_supported_model(model)
        self._config = config
        self._check_token_ids()
        super().__init__(config.max_new_tokens, config.eos_token_ids)

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
