"""Compiles for every kind of card what other tests compile for some: small kernels, variants, the bandwidth probe's."""

import re

import pytest
import torch

pytest.importorskip("triton")

from cbexp.engine.kernels import read_stream
from tests.engine import test_fused_kernels_ahead_of_time as fused_kernels
from tests.engine import test_kernels_ahead_of_time as decode_kernels
from tests.engine.test_kernels_ahead_of_time import SHARED_KIB, _own_cache  # noqa: F401


@pytest.mark.parametrize("name", fused_kernels.SMALL_KERNELS)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_small_kernels_fit(capability, name, tmp_path):
    kernel, constants, num_warps = fused_kernels.SMALL_KERNELS[name]
    compiled = fused_kernels.compile_kernel(kernel, capability, torch.bfloat16, constants, num_warps)
    # Nothing but reductions over a program's warps goes through it: many programs fit at once.
    assert compiled.metadata.shared <= 4096
    assert fused_kernels.stack_bytes(compiled, tmp_path) == 0
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == (capability >= 90)


@pytest.mark.parametrize(
    "options",
    [
        {"split": True},
        {"page_size": 16},
        {"window": 128, "sinks": True},
        {"window": 4096, "page_size": 16, "split": True},
        {"softcap": 50.0, "head_dim": 256},
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_variants_of_paged_attention_fit(capability, options, tmp_path):
    compiled, _ = decode_kernels.compile_attention(capability, **options)
    decode_kernels.check_fits(compiled, capability, tmp_path)


@pytest.mark.parametrize("tile", read_stream.READ_TILES, ids=str)
@pytest.mark.parametrize("capability", [70, 75, *SHARED_KIB])
def test_the_bandwidth_probe_reads_16_bytes_a_thread(capability, tile, tmp_path):
    """All loads of a program, unrolled."""
    compiled = decode_kernels.compile_kernel(
        read_stream._sum_chunks_kernel,
        capability,
        {"BLOCK": tile.block_size, "NUM_BLOCKS": tile.num_blocks},
        {"values": "fp32", "sums": "fp32"},
        num_warps=tile.num_warps,
    )
    assert fused_kernels.stack_bytes(compiled, tmp_path) == 0
    loads = re.findall(r"ld\.global\.v4\.\w32", compiled.asm["ptx"])
    assert len(loads) == tile.chunk_size // (4 * 32 * tile.num_warps)
