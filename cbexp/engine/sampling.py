"""The choice of next tokens, and what happens to the rows of a batch then; graphs can capture it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine.buffers import DecodeBuffers
from cbexp.engine.operators import operator


class HeadInputs(NamedTuple):
    """What a language-model head makes logits of: `hidden` [rows, hidden_size], `weight` [vocab_size, hidden_size]."""

    hidden: Tensor
    weight: Tensor


def compute_logits(logits: Tensor | HeadInputs) -> Tensor:
    """Logits [rows, vocab_size], computed where they are not yet."""
    return functional.linear(*logits) if isinstance(logits, HeadInputs) else logits


def choose(logits: Tensor | HeadInputs) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row, from logits [rows, vocab_size] or from what makes them.

    Greedy, as in `generate`: returns the id (int64 [rows]) of the largest logit, of equals the lowest, and that logit
    in float32, in which logits are compared. A NaN counts as the largest.
    """
    if isinstance(logits, HeadInputs):
        next_ids: Tensor
        best_logits: Tensor
        next_ids, best_logits = choose_from_hidden(*logits)
        return next_ids, best_logits
    return _choose_best(logits)


def _choose_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:  # half precision keeps its order
        logits = logits.float()
    next_ids = logits.argmax(dim=-1)
    return next_ids, logits.gather(1, next_ids[:, None])[:, 0].float()


def choose_from_hidden_plainly(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`choose` from the inputs of the head, in plain torch."""
    return _choose_best(functional.linear(hidden, weight))


@operator(choose_from_hidden_plainly)
def choose_from_hidden(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `choose_from_hidden_plainly`. For few rows the head's kernel keeps the best token of each tile alone."""
    from cbexp.engine.kernels import finish, linear, tiles

    if hidden.shape[0] > tiles.MAX_SKINNY_ROWS:
        return finish.largest_logit(functional.linear(hidden, weight))
    tile = tiles.choose_head_tile(hidden.shape[0], hidden.itemsize, tiles.device_limits(hidden.device))
    return finish.best_token(*linear.head_maxima(hidden, weight, tile))


def finish_step(rows: DecodeBuffers, logits: Tensor | HeadInputs) -> None:
    """Choose the next token of all `rows`, and `advance` them."""
    advance(rows, *choose(logits))


def advance(buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor) -> None:
    """Record the next tokens int64 [rows] of the first rows, end those that are done, move the others one position on.

    Their logits float32 [rows] are stored as they are. All in place, without host synchronisation. A row ends with its
    last allowed token or an EOS, which is recorded.
    """
    if next_ids.is_cuda and not torch.compiler.is_compiling():
        from cbexp.engine.kernels import finish  # a dozen launches in one

        finish.advance(buffers, next_ids, best_logits)
        return
    advance_plainly(buffers, next_ids, best_logits)


def advance_plainly(buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor) -> None:
    """`advance` in plain torch, on any device."""
    rows = next_ids.shape[0]
    token_ids, positions = buffers.token_ids[:rows], buffers.positions[:rows]
    remaining = buffers.remaining[:rows]
    is_active = positions >= 0
    outputs = torch.where(is_active, next_ids, -1).to(torch.int32)
    buffers.outputs[:, :rows].index_copy_(0, buffers.step.long().view(1), outputs[None])
    buffers.best_logits[:rows].copy_(best_logits)
    remaining.sub_(is_active.to(torch.int32))
    is_eos = (next_ids[:, None] == buffers.eos_ids).any(dim=1)
    goes_on = is_active & (remaining > 0) & ~is_eos
    token_ids.copy_(torch.where(goes_on, next_ids, token_ids))
    positions.copy_(torch.where(goes_on, positions + 1, -1))
    buffers.step.add_(1)
