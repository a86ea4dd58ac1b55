"""Puts back what upstream's manager changes around it: model, random state, references in tracebacks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from cbexp.engine.borrow import borrowed_for_inference


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Borrow the model for inference on its own device; afterwards its attention implementation is as it was.

    The device is made current, since upstream measures the free memory of the current one.
    """
    attention = model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(borrowed_for_inference(model, attention))
        if model.device.type == "cuda":
            stack.enter_context(torch.cuda.device(model.device))
        try:
            yield
        finally:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Keep torch's global generators, which upstream seeds when it builds a processor."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


def clear_frames(error: BaseException | None) -> None:
    """Drop the locals of an error's frames; the lines of its traceback stay readable.

    They hold upstream's processor, whose `__del__` prints a traceback when it runs at interpreter exit.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
