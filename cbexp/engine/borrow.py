"""Lends a model to the driver for the length of a drive and gives it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cbexp.engine.interrupts import deferring_interrupts


@contextmanager
def borrowed_for_inference(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the body in eval mode, without gradients and in the model's own dtype.

    Modes are flipped module by module and put back one by one: a caller may keep parts of a model in eval mode.
    Inference mode is left, since the cache is written by drives inside and outside of it.
    """
    in_training = [module for module in model.modules() if module.training]
    autocast_off = torch.autocast(device_type=device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast_off:
        for module in in_training:
            module.training = False
        try:
            yield
        finally:
            with deferring_interrupts():
                for module in in_training:
                    module.training = True
