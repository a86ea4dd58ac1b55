"""Runs a Llama-like model as fused kernels: five a layer, for decode steps and for prefill."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine import fused_ops as ops
from cbexp.engine.attention import attend_packed, packed_lengths
from cbexp.engine.buffers import LayerPages
from cbexp.engine.fused_layers import FusedLayer, FusedModel

# Takes normed hidden states [rows, hidden], a layer and its index; gives [rows, num_heads * head_dim].
Attend = Callable[[Tensor, FusedLayer, int], Tensor]


class FusedForward:
    """Implements `DecodeForward` on `model`; `pages` by layer index.

    Numerics are those of transformers' own code, rounded at the same places, but for the order of sums.
    """

    def __init__(self, model: FusedModel, pages: tuple[LayerPages, ...]) -> None:
        self._model = model
        self._pages = pages
        max_rows, device = pages[0].block_table.shape[0], pages[0].pages.device
        # Of one layer after the other: what attention leaves behind is what it finds.
        self._arrivals = torch.zeros(max_rows * model.num_kv_heads, dtype=torch.int32, device=device)
        torch._dynamo.mark_static_address(self._arrivals)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row and its logit: int64 [rows] and int32 [rows] to int64 and float32 [rows].

        Writes the rows' pages.
        """
        next_ids: Tensor
        best_logits: Tensor
        next_ids, best_logits = ops.best_tokens(self._decode(token_ids, positions), self._model.head)
        return next_ids, best_logits

    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The same step up to its logits, [rows, vocabulary] in the model's dtype."""
        return functional.linear(self._decode(token_ids, positions), self._model.head)

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor:
        """Run transformers' packed batch through its cache; the next token of the first `num_rows` of `logits_indices`.

        `batch`: the keyword arguments that transformers' batching hands to a model, tokens side by side.
        """
        hidden = self._run(batch["input_ids"][0], partial(self._attend_packed, batch))
        ends = batch["logits_indices"][:num_rows]
        next_ids: Tensor
        next_ids, _ = ops.best_tokens(hidden[ends], self._model.head)
        return next_ids

    def _decode(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self._run(token_ids, partial(self._attend_paged, positions))

    def _run(self, token_ids: Tensor, attend_in: Attend) -> Tensor:
        """Final normed hidden states [rows, hidden]."""
        model = self._model
        residual: Tensor
        hidden: Tensor
        residual, hidden = ops.embed_norm(token_ids, model.embedding, model.first_norm, model.eps)
        for index, layer in enumerate(model.layers):
            attended = attend_in(hidden, layer, index)
            residual, hidden = ops.project_add_norm(
                attended, layer.o, layer.o_bias, residual, layer.post_attention_norm, model.eps
            )
            gated = ops.gated_projection(hidden, layer.gate_up)
            residual, hidden = ops.project_add_norm(
                gated, layer.down, None, residual, layer.next_norm, model.eps
            )
        return hidden

    def _attend_paged(self, positions: Tensor, hidden: Tensor, layer: FusedLayer, index: int) -> Tensor:
        model, pages = self._model, self._pages[index]
        attended: Tensor = ops.attend_new_token(
            hidden,
            layer.qkv,
            layer.qkv_bias,
            positions,
            model.cos,
            model.sin,
            layer.q_norm,
            layer.k_norm,
            pages.pages,
            pages.block_table,
            pages.page_offset,
            self._arrivals,
            model.eps,
            model.scaling,
            pages.window,
            model.num_heads,
        )
        return attended

    def _attend_packed(self, batch: dict[str, Any], hidden: Tensor, layer: FusedLayer, index: int) -> Tensor:
        query, key, value = self._project_packed(batch["position_ids"][0], hidden, layer)
        kwargs = dict(batch)  # the cache puts this layer's lengths in place of all
        key, value = batch["cache"].update(key, value, index, kwargs=kwargs)
        # Not the module's, which has none in Mistral: its code asks the config.
        window = self._pages[index].window
        lengths = packed_lengths(kwargs, "sliding_attention" if window else "full_attention")
        packed = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        attended = attend_packed(*packed, lengths, self._model.scaling, window, None, None)
        return attended.reshape(hidden.shape[0], -1)

    def _project_packed(self, positions: Tensor, hidden: Tensor, layer: FusedLayer) -> list[Tensor]:
        """Queries, keys and values as model code hands them to a cache: each [1, heads, tokens, head_dim]."""
        model = self._model
        qkv: Tensor = ops.rotated_projection(
            hidden,
            layer.qkv,
            layer.qkv_bias,
            positions,
            model.cos,
            model.sin,
            layer.q_norm,
            layer.k_norm,
            model.eps,
            model.num_heads,
            model.num_kv_heads,
        )
        heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
        return [part.transpose(0, 1)[None] for part in qkv.split(heads, dim=1)]
