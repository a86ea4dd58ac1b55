"""One decode step: what every forward of it takes and gives, and the model's own code as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from cbexp.engine.buffers import LayerPages
from cbexp.engine.sampling import choose_best


class DecodeForward(Protocol):
    """The forward of one decode step, without host synchronisation; it changes nothing but the cache's pages."""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Next token ids int64 [rows] and their logits float32 [rows].

        For token ids int64 [rows] at positions int32 [rows] (-1: inactive row).
        """

    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The same step's logits [rows, vocab_size]."""


class PlainForward:
    """Implements `DecodeForward` by unchanged model code, which must run the engine's attention; `pages` by layer."""

    def __init__(self, model: nn.Module, pages: Sequence[LayerPages]) -> None:
        self.model = model
        self.pages = pages

    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `DecodeForward`.

        The largest logit wins, the first among equals, as in transformers. It is chosen in the model's own dtype:
        transformers turns logits to float32 first, which keeps their order.
        """
        return choose_best(self.logits(token_ids, positions))

    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """As `DecodeForward`, in the model's dtype."""
        output = self.model(
            input_ids=token_ids[:, None],
            position_ids=positions.clamp(min=0).long()[:, None],
            cache=_DecodeCache(self.pages, positions),
            attention_mask=None,
            use_cache=False,
        )
        return cast(Tensor, output.logits[:, -1])


class _DecodeCache:
    """What transformers' model code takes for its cache. It holds no state, so a compiled forward guards on none."""

    def __init__(self, pages: Sequence[LayerPages], positions: Tensor) -> None:
        self._pages = pages
        self._positions = positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are; the attention function gets `paged_layer` and `positions`."""
        kwargs["paged_layer"] = self._pages[layer_idx]
        kwargs["positions"] = self._positions
        return key_states, value_states
