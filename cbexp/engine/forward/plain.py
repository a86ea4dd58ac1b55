"""What a forward takes and gives, in a decode step and in a batch of prompts; the model's own code as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.borrow import Changes
from cbexp.engine.buffers import LayerPages
from cbexp.engine.sampling import HeadInputs

# Makes something of the logits of a chunk, whose number it is told.
Reduce = Callable[[Tensor | HeadInputs, int], Tensor]


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

    def prefill_in_chunks(
        self, batch: dict[str, Any], chunks: Sequence[Tensor], reduce: Reduce
    ) -> list[Tensor]:
        """Run transformers' packed batch, for what `reduce` makes of the logits of each chunk of its tokens.

        `chunks` int64 [rows of the chunk]: places of tokens in the batch. Logits exist for one chunk at a time, except
        where the model has no `logits_to_keep`.
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

    def prefill_in_chunks(
        self, batch: dict[str, Any], chunks: Sequence[Tensor], reduce: Reduce
    ) -> list[Tensor]:
        """As `Forward`."""
        model = cast(Any, self.model)
        if not model._supports_logits_to_keep() or model.base_model is model:
            logits = model(**batch).logits[0]
            return [reduce(logits[rows], chunk) for chunk, rows in enumerate(chunks)]
        with _run_once(model.base_model):
            return [
                reduce(model(**batch, logits_to_keep=rows).logits[0], chunk)
                for chunk, rows in enumerate(chunks)
            ]


@contextmanager
def _run_once(module: nn.Module) -> Iterator[None]:
    """The first call of `module` in the body is all that runs; the others return what it has."""
    forward = module.forward
    outputs: list[Any] = []

    def remember(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **kwargs))
        return outputs[0]

    changes = Changes()
    try:
        changes.set(vars(module), "forward", remember)
        yield
    finally:
        changes.undo()


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
