"""What the drivers that run transformers' own generation share: the checks of model, mode and ids."""

from __future__ import annotations

from typing import Any, ClassVar

import transformers

from cbexp.drivers.registry import DriverKind
from cbexp.engine.queued_driver import QueuedDriver
from cbexp.engine.requests import RequestLimits
from cbexp.engine.settings import resolve_decoding
from cbexp.engine.support import check_transformers_version, require_supported_model
from cbexp.engine.types import CBSyncConfig


class ModelDriver(QueuedDriver):
    """A `QueuedDriver` on a model of ours, which reads of `config` what its `kind` says.

    `model` is a transformers causal language model on one device, bare or inside a PEFT wrapper. It runs the attention
    that it was loaded with.

    Raises at construction: `UnsupportedTransformersError`, `UnsupportedModelError`, `EngineError` for a compile mode
    that the driver lacks, and `ValueError` for a stop or pad id outside the vocabulary.
    """

    kind: ClassVar[DriverKind]
    lost_error = "transformers lost the request"

    def __init__(self, model: Any, config: CBSyncConfig) -> None:
        check_transformers_version(transformers.__version__)
        self.kind.check_compile_mode(config.compile_mode)
        self._model = require_supported_model(model)
        self._config = config
        self._decoding = resolve_decoding(config, None, self._model.config.vocab_size)
        super().__init__(self._decoding.max_new_tokens, self._decoding.eos_token_ids)

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
            "max_new_tokens": self._decoding.max_new_tokens,
            "eos_token_ids": list(self._decoding.eos_token_ids),
            "pad_token_id": self._decoding.pad_token_id,
        }

    def _request_limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self._model.config.vocab_size,
            max_positions=getattr(self._model.config, "max_position_embeddings", None),
            max_stored_tokens=None,
        )
