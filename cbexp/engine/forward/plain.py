"""What a forward takes and gives, in a decode step and in a batch of prompts; the model's own code as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor
from transformers import PreTrainedModel

from cbexp.engine.buffers import LayerPages
from cbexp.engine.sampling import HeadInputs


class Forward(Protocol):
    """Runs a model over the cache's pages, which alone it changes, without host synchronisation.

    It gives logits [rows, vocab_size] in the model's dtype, or what the head makes them of.
    """

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor | HeadInputs:
        """Run a decode step: token ids int64 [rows] at positions int32 [rows] (-1: inactive row)."""

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor | HeadInputs:
        """Run transformers' packed batch, for the logits of the first `num_rows` of its `logits_indices`.

        `batch`: the keyword arguments that transformers' batching hands to a model, tokens side by side.
        """


class PlainForward:
    """Implements `Forward` by unchanged model code; decode steps need the engine's attention, and `pages` by layer."""

    def __init__(self, model: PreTrainedModel, pages: Sequence[LayerPages]) -> None:
        self.model = model
        self.pages = pages

    def begin(self) -> None:
        """Nothing: the model is read when it runs."""

    def read(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """As `Forward`."""
        output = self.model(
            input_ids=token_ids[:, None],
            position_ids=positions.clamp(min=0).long()[:, None],
            cache=_DecodeCache(self.pages, positions),
            attention_mask=None,
            use_cache=False,
        )
        return cast(Tensor, output.logits[:, -1])

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor:
        """As `Forward`, with the attention that the model has."""
        ends = batch["logits_indices"][:num_rows]
        if cast(Any, self.model)._supports_logits_to_keep():
            return cast(Tensor, self.model(**batch, logits_to_keep=ends).logits[0])
        return cast(Tensor, self.model(**batch).logits[0, ends])


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
