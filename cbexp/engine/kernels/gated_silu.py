"""The gated activation between an MLP's two products: silu(gate) * up, rounded where the model's own code rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbexp.engine.kernels.dependent_launch import launch_options, release_successor, wait_for_predecessor


@triton.jit
def silu(gate, dtype: tl.constexpr):
    """SiLU in float32, rounded to `dtype`."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)


@triton.jit
def _silu_product_kernel(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, (silu(gate, dtype) * up).to(dtype), mask=inside)


def silu_product(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [rows, n] of `gate_up` [rows, 2n]."""
    num_rows, width = gate_up.shape
    num_columns = width // 2
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(num_columns))
    _silu_product_kernel[(num_rows, triton.cdiv(num_columns, block))](
        gate_up, out, N=num_columns, BLOCK=block, num_warps=4, **launch_options(gate_up.device)
    )
    return out
