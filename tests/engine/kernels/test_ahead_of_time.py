"""Compiles every kernel for every kind of card, without one, with the tiles that such a card would get.

Two kinds in the default suite, the others in the slow one. Cards before the 80s have neither bfloat16 nor asynchronous
copies: there, large tiles spill, which is slow and right.
"""

import os
import re
import subprocess

import pytest
import torch

from cbexp.engine.forward.products import MAX_SKINNY_ROWS
from cbexp.engine.kernels.tiles import MAX_ATTENTION_SPLITS, DeviceLimits

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cbexp.engine.kernels import (  # noqa: E402
    finish,
    heads,
    linear,
    norms,
    paged_attention,
    read_stream,
    rotated_attention,
    tiles,
)

# Compute capability -> shared memory in KiB that one program may take (CUDA programming guide, compute capabilities).
SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CARDS = [86, 90, *(pytest.param(card, marks=pytest.mark.slow) for card in SHARED_KIB if card not in (86, 90))]
# As much as their largest tiles spill.
OLD_STACK_BYTES = {70: 12 * 1024, 75: 4 * 1024}
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Qwen3-4B.
HIDDEN, INTERMEDIATE, VOCABULARY = 2560, 9728, 151936
QKV = (4096, 1024, 1024)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
# Of the kernels' pointers; what is not here is of the model's dtype.
POINTERS = {
    **dict.fromkeys(["out_0", "out_1", "out_2", "parts", "query_parts", "key_parts", "value_parts"], "fp32"),
    **dict.fromkeys(["partial_acc", "partial_sums", "partial", "log_sums", "values", "sums"], "fp32"),
    **dict.fromkeys(["tile_values", "next_logits", "best_logits"], "fp32"),
    **dict.fromkeys(["token_ids", "next_ids", "eos_ids"], "i64"),
    **dict.fromkeys(["positions", "remaining", "outputs", "step", "block_table", "page_offset"], "i32"),
    **dict.fromkeys(["tile_ids", "arrivals"], "i32"),
}
FLOATS = ("eps", "scale", "scaling")
INTEGERS = re.compile(r"num_.*|.*_stride|table_width|chunk_size|max_chunks")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def limits(card):
    return DeviceLimits(num_multiprocessors=100, max_shared_bytes=SHARED_KIB[card] * 1024)


def half_of(card):
    return torch.bfloat16 if card >= 80 else torch.float16


def compile_kernel(kernel, card, dtype, constants, *, num_warps=4, num_stages=3, **pointers):
    """As launched: tensors begin at multiples of 16 bytes, so that loads can be wide and pipelined."""
    constants = constants | {"DEPENDENT": card >= 90}
    types = POINTERS | pointers
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(index,)] = "constexpr", constants[name]
        elif name in FLOATS:
            signature[name] = "fp32"
        elif INTEGERS.fullmatch(name):
            signature[name] = "i32"
        else:
            signature[name] = "*" + types.get(name, TRITON_TYPES[dtype])
        # All strides but the table's are multiples of 16 too.
        if signature[name].startswith("*") or (name.endswith("_stride") and name != "table_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": num_warps, "num_stages": num_stages} | (
        {"launch_pdl": True} if card >= 90 else {}
    )
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def compile_product(kernel, card, dtype, tile, num_rows, num_inner, **constants):
    constants |= {
        "K": num_inner,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_ROWS": tiles.block_rows(num_rows),
        "STAGES": tile.num_stages,
        "EXACT": dtype == torch.float32,
    }
    return compile_kernel(kernel, card, dtype, constants, num_warps=tile.num_warps)


def compile_linear(card, dtype, num_rows=MAX_SKINNY_ROWS, num_inner=HIDDEN, sizes=QKV, has_bias=False):
    tile = tiles.choose_split_tile(num_rows, sizes, num_inner, dtype.itemsize, limits(card))
    n = dict(zip(("N_0", "N_1", "N_2"), (*sizes, 0, 0), strict=False))
    return compile_product(
        linear._linear_kernel,
        card,
        dtype,
        tile,
        num_rows,
        num_inner,
        **n,
        SPLITS=tile.splits,
        HAS_BIAS=has_bias,
    )


def compile_down(card, dtype, num_rows=MAX_SKINNY_ROWS, num_inner=INTERMEDIATE):
    return compile_linear(card, dtype, num_rows, num_inner, sizes=(HIDDEN,))


def compile_gate_up(card, dtype, num_rows=MAX_SKINNY_ROWS, num_inner=HIDDEN):
    tile = tiles.choose_gated_tile(num_rows, dtype.itemsize, limits(card))
    return compile_product(linear._gate_up_kernel, card, dtype, tile, num_rows, num_inner, N=INTERMEDIATE)


def compile_head(card, dtype, num_rows=MAX_SKINNY_ROWS, num_inner=HIDDEN):
    tile = tiles.choose_head_tile(num_rows, dtype.itemsize, limits(card))
    return compile_product(linear._head_kernel, card, dtype, tile, num_rows, num_inner, N=VOCABULARY)


PRODUCTS = [compile_linear, compile_down, compile_gate_up, compile_head]


def compile_rotated_attention(
    card, dtype, page_size=256, window=0, has_norm=True, num_programs=132, is_chunked=False
):
    tile = tiles.choose_rotated_attention_tile(num_programs, HEAD_DIM, dtype.itemsize, limits(card))
    constants = {
        "NUM_HEADS": NUM_HEADS,
        "NUM_KV_HEADS": NUM_KV_HEADS,
        "HEAD_DIM": HEAD_DIM,
        "PAGE": page_size,
        "WINDOW": window,
        "IS_CHUNKED": is_chunked,
        "SPLITS": 2,
        "HAS_NORM": has_norm,
        "GROUP_ROWS": 16,
        "BLOCK_N": tile.num_tokens,
        "STAGES": tile.num_stages,
        "EXACT": dtype == torch.float32,
    }
    kernel = rotated_attention._rotated_attention_kernel
    return compile_kernel(kernel, card, dtype, constants, num_warps=tile.num_warps)


def compile_paged_attention(
    card, dtype, head_dim=128, page_size=256, group=4, window=0, softcap=0.0, sinks=False, split=False
):
    group_rows = max(tiles.MIN_GROUP_ROWS, triton.next_power_of_2(group))
    block_dim = triton.next_power_of_2(head_dim)
    tile = tiles.choose_attention_tile(group_rows, block_dim, dtype.itemsize, limits(card))
    constants = {
        "GROUP": group,
        "GROUP_ROWS": group_rows,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_TOKENS": tile.num_tokens,
        "WINDOW": window,
        "SOFTCAP": softcap,
    }
    constants |= ({} if sinks else {"sinks": None}) | ({} if split else {"log_sums": None})
    pipeline = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    pointers = {"output": "fp32"} if split else {}
    compiled = compile_kernel(paged_attention._attend_kernel, card, dtype, constants, **pipeline, **pointers)
    # What tiles are chosen by must not be too low.
    if group_rows == tiles.MIN_GROUP_ROWS and card >= 80:
        assert compiled.metadata.shared <= tile.shared_bytes(group_rows, block_dim, dtype.itemsize) + 1024
    return compiled


def check_large_kernel(compiled, card, dtype, folder, max_stack=16):
    """Fits, fetches ahead 16 bytes a thread, multiplies as exactly as it should, and lets go once it has read."""
    assert 0 < compiled.metadata.shared <= SHARED_KIB[card] * 1024
    ptx = compiled.asm["ptx"]
    check_target(ptx, card)
    if card < 80:
        assert stack_bytes(compiled, folder) <= OLD_STACK_BYTES[card]
        assert "bf16" not in ptx
        return
    # "cg" is past the registers, in 16 bytes.
    assert set(re.findall(r"cp\.async\.(\w\w)\.", ptx)) == {"cg"}
    is_multiplied = any(name in ptx for name in ("wgmma", "mma.sync", "tcgen05"))
    if dtype == torch.float32:
        assert not is_multiplied
    else:
        assert is_multiplied
        assert stack_bytes(compiled, folder) <= max_stack
    if card >= 90:
        assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")


def check_target(ptx, card):
    assert f".target sm_{card}" in ptx
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == (card >= 90)
    assert ("cp.async" not in ptx) or card >= 80


def stack_bytes(compiled, folder):
    """Registers that are spilled take many of them."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    [size] = re.findall(r" STACK:(\d+) ", usage)
    return int(size)


# The largest kernels, for the most rows that they serve, which take the most memory


@pytest.mark.parametrize("compile_product", PRODUCTS)
@pytest.mark.parametrize("card", CARDS)
def test_products(card, compile_product, tmp_path):
    compiled = compile_product(card, half_of(card))
    check_large_kernel(compiled, card, half_of(card), tmp_path)
    if card >= 90:
        ptx = compiled.asm["ptx"]
        assert ptx.rindex("cp.async.cg") < ptx.rindex("griddepcontrol.launch_dependents")


@pytest.mark.slow
@pytest.mark.parametrize("card", [86, 90])
@pytest.mark.parametrize("compile_product", PRODUCTS)
def test_products_in_float32(card, compile_product, tmp_path):
    check_large_kernel(compile_product(card, torch.float32), card, torch.float32, tmp_path)


@pytest.mark.parametrize(
    ("compile_product", "options"),
    [
        (compile_linear, {"has_bias": True}),
        (compile_linear, {"sizes": (4096, 1000, 1000)}),
        *(
            pytest.param(each, options, marks=pytest.mark.slow)
            for each in PRODUCTS
            for options in ({"num_rows": 1}, {"num_rows": 33, "num_inner": 2576})
        ),
    ],
    ids=str,
)
def test_products_of_other_sizes(compile_product, options, tmp_path):
    check_large_kernel(compile_product(90, torch.float16, **options), 90, torch.float16, tmp_path)


ROTATED_VARIANTS = [
    {},
    {"num_programs": 2048, "is_chunked": True},
    *(
        pytest.param(options, marks=pytest.mark.slow)
        for options in (
            {"is_chunked": True},
            {"num_programs": 2048},
            {"page_size": 16},
            {"page_size": 4, "has_norm": False},
            {"window": 4096},
            {"window": 100, "page_size": 32},
        )
    ),
]


@pytest.mark.parametrize("options", ROTATED_VARIANTS, ids=str)
@pytest.mark.parametrize("card", CARDS)
def test_rotated_attention(card, options, tmp_path):
    compiled = compile_rotated_attention(card, half_of(card), **options)
    check_large_kernel(compiled, card, half_of(card), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("card", [86, 90])
def test_rotated_attention_in_float32(card, tmp_path):
    check_large_kernel(compile_rotated_attention(card, torch.float32), card, torch.float32, tmp_path)


def test_rotated_attention_has_tiles_in_flight():
    """A wait for all copies but the newest, in the main loop: of pages found in the same iteration it is for all."""
    ptx = compile_rotated_attention(90, torch.bfloat16, num_programs=2048).asm["ptx"]
    in_flight = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    assert max(in_flight) >= 2


PAGED_VARIANTS = [
    {},
    {"split": True, "sinks": True, "window": 128},
    *(
        pytest.param(options, marks=pytest.mark.slow)
        for options in (
            {"head_dim": 64},
            {"head_dim": 256},
            {"head_dim": 80},
            {"page_size": 16},
            {"window": 4096, "page_size": 16, "split": True},
            {"softcap": 50.0, "head_dim": 256},
            {"group": 64},
        )
    ),
]


@pytest.mark.parametrize("options", PAGED_VARIANTS, ids=str)
@pytest.mark.parametrize("card", CARDS)
def test_paged_attention(card, options, tmp_path):
    compiled = compile_paged_attention(card, half_of(card), **options)
    check_large_kernel(compiled, card, half_of(card), tmp_path, max_stack=0)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("card", SHARED_KIB)
def test_paged_attention_in_float32(card, head_dim, tmp_path):
    compiled = compile_paged_attention(card, torch.float32, head_dim=head_dim)
    assert 0 < compiled.metadata.shared <= SHARED_KIB[card] * 1024
    assert stack_bytes(compiled, tmp_path) <= OLD_STACK_BYTES.get(card, 0)


@pytest.mark.parametrize("page_size", [16, 256])
def test_paged_attention_has_tiles_in_flight(page_size):
    """Keys and values of two tiles; page numbers hold nothing up."""
    compiled = compile_paged_attention(90, torch.bfloat16, page_size=page_size)
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg.memdesc<(\d)x64x128xbf16", compiled.asm["ttgir"])
    assert buffers == ["2", "2"]


# Small kernels

ROTATE = {"NUM_HEADS": NUM_HEADS, "HEAD_DIM": HEAD_DIM, "SPLITS": 2, "HEADS": 8, "HALF": 64}
SMALL_KERNELS = {
    "embed_norm": (norms._embed_norm_kernel, {"N": HIDDEN, "BLOCK": 4096}, 8),
    "add_norm": (norms._add_norm_kernel, {"N": HIDDEN, "BLOCK": 4096, "SPLITS": 4}, 8),
    "rotate": (heads._norm_and_rotate_kernel, ROTATE | {"HAS_NORM": True}, 2),
    "rotate_llama": (heads._norm_and_rotate_kernel, ROTATE | {"HAS_NORM": False}, 2),
    "silu_product": (linear._silu_product_kernel, {"N": INTERMEDIATE, "BLOCK": 2048}, 4),
    "tile_maxima": (finish._tile_maxima_kernel, {"N": VOCABULARY, "BLOCK": 4096}, 4),
    "best_token": (finish._best_token_kernel, {"BLOCK": 4096}, 4),
    "advance": (finish._advance_kernel, {"NUM_EOS": 2, "BLOCK": 256}, 1),
    "combine": (
        paged_attention._combine_kernel,
        {"HEAD_DIM": 256, "BLOCK_DIM": 256, "BLOCK_SPLITS": MAX_ATTENTION_SPLITS},
        4,
    ),
}


@pytest.mark.parametrize("name", SMALL_KERNELS)
@pytest.mark.parametrize("card", CARDS)
def test_small_kernels_let_their_successor_go_at_once(card, name, tmp_path):
    kernel, constants, num_warps = SMALL_KERNELS[name]
    compiled = compile_kernel(kernel, card, half_of(card), constants, num_warps=num_warps)
    # Nothing but reductions over a program's warps goes through it: many programs fit at once.
    assert compiled.metadata.shared <= 4096 or name == "combine"
    assert stack_bytes(compiled, tmp_path) == 0
    ptx = compiled.asm["ptx"]
    check_target(ptx, card)
    if card >= 90:
        assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
        # What the predecessor makes is not read before it has ended.
        assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]


@pytest.mark.parametrize("tile", read_stream.READ_TILES, ids=str)
@pytest.mark.parametrize("card", CARDS)
def test_the_bandwidth_probe_reads_16_bytes_a_thread(card, tile, tmp_path):
    """All loads of a program, unrolled."""
    constants = {"BLOCK": tile.block_size, "NUM_BLOCKS": tile.num_blocks}
    kernel = read_stream._sum_chunks_kernel
    compiled = compile_kernel(kernel, card, torch.float32, constants, num_warps=tile.num_warps)
    assert stack_bytes(compiled, tmp_path) == 0
    loads = re.findall(r"ld\.global\.v4\.\w32", compiled.asm["ptx"])
    assert len(loads) == tile.chunk_size // (4 * 32 * tile.num_warps)
