"""Mends what Triton's interpreter does to bfloat16, where it interprets."""

import os

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_in_the_interpreter():
    """It keeps bfloat16 as bits in uint16. Its dot would multiply those bits; from float32, it cuts them off."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot, convert_float = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *rest):
        return create_dot(self, widen(a), widen(b), *rest)

    def convert(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert_float(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
        return rounded.view(torch.uint16).numpy().reshape(data.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        patch.setattr(interpreter, "_convert_float", convert)
        yield
