"""Compiles the paged attention kernel for every kind of card, without one, and checks that it fits."""

import os
import re
import subprocess

import pytest
import torch

from cbexp.engine.kernels.attention_tiles import (
    MAX_SPLITS,
    DeviceLimits,
    choose_attention_tile,
    choose_num_splits,
)

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cbexp.engine.kernels import paged_attention  # noqa: E402

# Compute capability -> shared memory in KiB that one program may take (CUDA programming guide, compute capabilities).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ONE_DTYPE_OF_TENSORS = {"query", "key", "value", "pages", "sinks"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def limits(capability):
    return DeviceLimits(num_multiprocessors=100, max_shared_bytes=SHARED_KIB[capability] * 1024)


def compile_kernel(kernel, capability, constants, types, **options):
    """Compile `kernel` with `constants` and pointers to `types` by name; `scaling` is float32, the rest int32."""
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "i32"
        if name in constants:
            signature[name] = "constexpr"
            fixed[(index,)] = constants[name]
        elif name in types:
            signature[name] = "*" + types[name]
        elif name == "scaling":
            signature[name] = "fp32"
        # As at a launch: allocations and all strides but the table's are multiples of 16.
        if name in types or (name.endswith("_stride") and name != "table_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    if capability >= 90:
        options["launch_pdl"] = True
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_attention(
    capability, *, head_dim=128, dtype=torch.bfloat16, page_size=256, group=4, split=False, **options
):
    group_rows = max(paged_attention.MIN_GROUP_ROWS, triton.next_power_of_2(group))
    block_dim = triton.next_power_of_2(head_dim)
    tile = choose_attention_tile(group_rows, block_dim, dtype.itemsize, limits(capability))
    constants = {
        "GROUP": group,
        "GROUP_ROWS": group_rows,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_TOKENS": tile.num_tokens,
        "WINDOW": options.get("window", 0),
        "SOFTCAP": options.get("softcap", 0.0),
        "DEPENDENT": capability >= 90,
    }
    if not options.get("sinks"):
        constants["sinks"] = None
    if not split:
        constants["log_sums"] = None
    types = dict.fromkeys(ONE_DTYPE_OF_TENSORS, TRITON_TYPES[dtype])
    types |= dict.fromkeys(["block_table", "positions", "page_offset"], "i32")
    types |= {"output": "fp32" if split else TRITON_TYPES[dtype], "log_sums": "fp32"}
    types = {name: kind for name, kind in types.items() if name not in constants}
    kernel = paged_attention._attend_kernel
    return compile_kernel(
        kernel, capability, constants, types, num_warps=tile.num_warps, num_stages=tile.num_stages
    ), tile


def check_fits(compiled, capability, folder):
    assert 0 < compiled.metadata.shared <= SHARED_KIB[capability] * 1024
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    assert " STACK:0 " in usage, f"registers are spilled: {usage}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_attention_fits(capability, head_dim, dtype, tmp_path):
    compiled, tile = compile_attention(capability, head_dim=head_dim, dtype=dtype)
    check_fits(compiled, capability, tmp_path)
    # What tiles are chosen by must not be too low.
    assert compiled.metadata.shared <= tile.shared_bytes(16, head_dim, dtype.itemsize) + 1024


@pytest.mark.parametrize("capability", [86, 90])
@pytest.mark.parametrize(
    "options",
    [
        {"split": True},
        {"page_size": 16},
        {"window": 128, "sinks": True},
        {"softcap": 50.0},
        {"group": 64},
        {"head_dim": 80, "dtype": torch.float16},
    ],
    ids=str,
)
def test_variants_fit(capability, options, tmp_path):
    check_fits(compile_attention(capability, **options)[0], capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_combining_fits(capability, tmp_path):
    constants = {"HEAD_DIM": 256, "BLOCK_DIM": 256, "BLOCK_SPLITS": MAX_SPLITS, "DEPENDENT": capability >= 90}
    types = {"partial": "fp32", "log_sums": "fp32", "output": "bf16"}
    check_fits(
        compile_kernel(paged_attention._combine_kernel, capability, constants, types), capability, tmp_path
    )


@pytest.mark.parametrize("page_size", [16, 256])
def test_loads_of_later_tiles_are_in_flight(page_size):
    """Keys and values of two tiles, in loads of 16 bytes past the registers ("cg"); page numbers hold nothing up."""
    compiled, tile = compile_attention(90, page_size=page_size)

    assert tile.num_stages == 3
    buffers = re.findall(
        rf"ttg\.local_alloc : \(\) -> !ttg.memdesc<(\d)x{tile.num_tokens}x128xbf16", compiled.asm["ttgir"]
    )
    assert buffers == ["2", "2"]
    assert set(re.findall(r"cp\.async\.(\w\w)\.", compiled.asm["ptx"])) == {"cg"}


@pytest.mark.parametrize("capability", [80, 90])
def test_waits_for_its_predecessor_where_the_card_can(capability):
    ptx = compile_attention(capability)[0].asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)


def test_splits_by_what_the_device_has_left():
    device = DeviceLimits(num_multiprocessors=132, max_shared_bytes=1)

    def splits(rows, num_slots=32_768):
        return choose_num_splits(rows * 8, num_slots, device)

    assert [splits(rows) for rows in (1, 2, 4, 8, 16, 32, 1024)] == [33, 16, 8, 4, 2, 1, 1]
    assert splits(1, num_slots=1024) == 4
    assert splits(1, num_slots=100) == 1
    assert choose_num_splits(1, 1_000_000, device) == MAX_SPLITS
