from typing import Protocol

from torch import Tensor


class DecodeForward(Protocol):
    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...
    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor: ...


from cbexp.engine.decode_model import DecodeModel
from cbexp.engine.fused_forward import FusedForward


class ForwardChoice(DecodeModel):
    def prefill(self, batch, num_rows):
        return self.forward.prefill(batch, num_rows) if isinstance(self.forward, FusedForward) else None
