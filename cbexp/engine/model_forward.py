"""One decode step of a model over its unchanged code: ids and positions in, next ids and their logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from cbexp.engine.buffers import LayerPages
from cbexp.engine.decode_cache import DecodeCache
from cbexp.engine.sampling import choose_best


class ModelForward:
    """Implements `DecodeForward`. The model must run the engine's attention; each row is one token of one request."""

    def __init__(self, model: nn.Module, layers: Sequence[LayerPages]) -> None:
        self.model = model
        self.layers = layers

    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Next token ids int64 [rows] and their logits float32 [rows].

        For token ids int64 [rows] at positions int32 [rows] (-1: inactive row).

        The largest logit wins, the first among equals, as in transformers; in the model's own dtype, since the step
        to float32 there keeps every order.
        """
        return choose_best(self.logits(token_ids, positions))

    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The same step's logits [rows, vocab_size] in the model's dtype."""
        output = self.model(
            input_ids=token_ids[:, None],
            position_ids=positions.clamp(min=0).long()[:, None],
            cache=DecodeCache(self.layers, positions),
            attention_mask=None,
            use_cache=False,
        )
        return cast(Tensor, output.logits[:, -1])
