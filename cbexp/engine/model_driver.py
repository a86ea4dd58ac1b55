"""What the drivers that run a model object of the caller's share: its checks, and the settings as they run."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import GenerationConfig

from cbexp.engine.requests import RequestLimits
from cbexp.engine.rollout_driver import RolloutDriver
from cbexp.engine.settings import resolve_decoding
from cbexp.engine.support import check_transformers_version, read_positions, require_supported_model
from cbexp.engine.types import CBSyncConfig


class ModelDriver(RolloutDriver):
    """A `RolloutDriver` on `model`, a transformers causal language model on one device, bare or in a PEFT wrapper.

    Raises at construction: `UnsupportedTransformersError`, `UnsupportedModelError`, and what `resolve_decoding` raises.
    """

    lost_error = "transformers lost the request"

    def __init__(
        self,
        model: Any,
        config: CBSyncConfig,
        generation_config: GenerationConfig | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_transformers_version(transformers.__version__)
        self._config = config
        self._model = require_supported_model(model)
        self._tokenizer = tokenizer
        self._decoding = resolve_decoding(
            config,
            generation_config,
            self._model.generation_config,
            self._model.config.vocab_size,
            reads_text=tokenizer is not None,
        )
        super().__init__(self._decoding.max_new_tokens, self._decoding.eos_token_ids, self._decoding.sampling)

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values."""
        return {
            "transformers": transformers.__version__,
            "model_class": type(self._model).__name__,
            "attn_implementation": self._model.config._attn_implementation,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
        } | self._decoding.describe()

    def _request_limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self._model.config.vocab_size,
            positions=read_positions(self._model.config),
            max_stored_tokens=None,
            reads_text=self._tokenizer is not None,
        )
