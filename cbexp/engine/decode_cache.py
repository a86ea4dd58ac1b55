"""Stands in for a cache in a model's decode forward: hands each layer its pages and leaves the rest to attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cbexp.engine.buffers import LayerPages


class DecodeCache:
    """What transformers' model code takes for its cache. It holds no state, so a compiled forward guards on none."""

    def __init__(self, layers: Sequence[LayerPages], positions: Tensor) -> None:
        self._layers = layers
        self._positions = positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are; the attention function gets `paged_layer` and `positions`."""
        kwargs["paged_layer"] = self._layers[layer_idx]
        kwargs["positions"] = self._positions
        return key_states, value_states
