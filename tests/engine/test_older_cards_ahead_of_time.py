"""Compiles the kernels for cards that have float16 and no bfloat16, without one, and checks that they fit.

Triton leaves such cards' tensor cores and asynchronous copies alone, and large tiles spill: slow, but right.
"""

import itertools

import pytest
import torch

from cbexp.engine.fused_ops import MAX_SKINNY_ROWS
from cbexp.engine.kernels.attention_tiles import MAX_SPLITS

pytest.importorskip("triton")

from cbexp.engine.kernels import paged_attention
from tests.engine import test_fused_kernels_ahead_of_time as fused_kernels
from tests.engine import test_kernels_ahead_of_time as decode_kernels
from tests.engine.test_kernels_ahead_of_time import _own_cache  # noqa: F401

# Compute capability -> shared memory in KiB that one program may take (CUDA programming guide, compute capabilities).
OLD_SHARED_KIB = {70: 96, 75: 64}
DTYPE = torch.float16
# As much as tiles of 256 columns spill; each thread has its own.
MAX_STACK_BYTES = 4096


@pytest.fixture(autouse=True)
def _old_cards(monkeypatch):
    """Known to the helpers for these tests alone: the others are for cards with asynchronous copies."""
    for capability, shared_kib in OLD_SHARED_KIB.items():
        monkeypatch.setitem(decode_kernels.SHARED_KIB, capability, shared_kib)


def check_fits(compiled, capability, folder, needs_shared=True):
    """It is there, with no more shared memory than the card has and with nothing that it lacks."""
    shared = compiled.metadata.shared
    assert needs_shared <= shared <= OLD_SHARED_KIB[capability] * 1024
    assert fused_kernels.stack_bytes(compiled, folder) < MAX_STACK_BYTES
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert "cp.async" not in ptx
    assert "griddepcontrol" not in ptx
    assert "bf16" not in ptx


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*itertools.product([64, 128, 256], [DTYPE, torch.float32])], ids=str
)
@pytest.mark.parametrize("capability", OLD_SHARED_KIB)
def test_paged_attention_fits(capability, head_dim, dtype, tmp_path):
    compiled, _ = decode_kernels.compile_attention(capability, head_dim=head_dim, dtype=dtype)
    check_fits(compiled, capability, tmp_path)


@pytest.mark.parametrize(
    "options", [{"split": True}, {"page_size": 16, "window": 128, "sinks": True}, {"softcap": 50.0}], ids=str
)
@pytest.mark.parametrize("capability", OLD_SHARED_KIB)
def test_variants_of_paged_attention_fit(capability, options, tmp_path):
    compiled, _ = decode_kernels.compile_attention(capability, dtype=DTYPE, **options)
    check_fits(compiled, capability, tmp_path)


@pytest.mark.parametrize("capability", OLD_SHARED_KIB)
def test_combining_splits_fits(capability, tmp_path):
    constants = {"HEAD_DIM": 256, "BLOCK_DIM": 256, "BLOCK_SPLITS": MAX_SPLITS, "DEPENDENT": False}
    types = {"partial": "fp32", "log_sums": "fp32", "output": "fp16"}
    kernel = paged_attention._combine_kernel
    check_fits(decode_kernels.compile_kernel(kernel, capability, constants, types), capability, tmp_path)


@pytest.mark.parametrize("num_rows", [1, MAX_SKINNY_ROWS])
@pytest.mark.parametrize("compile_product", fused_kernels.PRODUCTS)
def test_products_fit(compile_product, num_rows, tmp_path):
    check_fits(compile_product(75, DTYPE, num_rows), 75, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_chunked": True},
        {"num_programs": 2048, "is_chunked": True},
        {"page_size": 16, "has_norm": False},
        {"window": 100, "page_size": 32},
    ],
    ids=str,
)
def test_fused_attention_fits(options, tmp_path):
    check_fits(fused_kernels.compile_attention(75, DTYPE, **options), 75, tmp_path)


@pytest.mark.parametrize("name", fused_kernels.SMALL_KERNELS)
def test_small_kernels_fit(name, tmp_path):
    kernel, constants, num_warps = fused_kernels.SMALL_KERNELS[name]
    compiled = fused_kernels.compile_kernel(kernel, 75, DTYPE, constants, num_warps)
    check_fits(compiled, 75, tmp_path, needs_shared=False)
