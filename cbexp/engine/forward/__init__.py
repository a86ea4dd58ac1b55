"""A decode step's logits by the model's own code, with fewer products, or as fused layers."""

from cbexp.engine.forward.choose import ForwardChoice, resolve_fusion
from cbexp.engine.forward.plain import Forward, PlainForward

__all__ = ["Forward", "ForwardChoice", "PlainForward", "resolve_fusion"]
