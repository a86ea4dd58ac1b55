"""The choice of next tokens from logits, and what happens to the rows of a batch then; graphs can capture it."""

from __future__ import annotations

import torch
from torch import Tensor

from cbexp.engine.buffers import DecodeBuffers


def choose_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Id (int64 [rows]) of the largest of logits [rows, vocab_size], of equals the lowest; that logit in float32."""
    next_ids = logits.argmax(dim=-1)
    return next_ids, logits.gather(1, next_ids[:, None])[:, 0].float()


def advance(buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor) -> None:
    """Record the next tokens int64 [rows] of the first rows, end those that are done, move the others one position on.

    Their logits float32 [rows] are stored as they are. All in place, without host synchronisation. A row ends with its
    last allowed token or an EOS, which is recorded.
    """
    if next_ids.is_cuda and not torch.compiler.is_compiling():
        from cbexp.engine.kernels import finish  # a dozen launches in one

        finish.advance(buffers, next_ids, best_logits)
        return
    _advance_plainly(buffers, next_ids, best_logits)


def _advance_plainly(buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor) -> None:
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
