"""Compiles the fused kernels for every kind of card, without one, with the tiles that such a card would get."""

import os
import re
import subprocess

import pytest
import torch

from cbexp.engine.fused_ops import MAX_SKINNY_ROWS
from cbexp.engine.kernels.attention_tiles import AttentionTile, DeviceLimits

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cbexp.engine.kernels import (  # noqa: E402
    decode_finish,
    decode_linear,
    decode_norms,
    gated_silu,
    projected_heads,
    rotated_attention,
    tiles,
)
from tests.engine.test_kernels_ahead_of_time import (  # noqa: E402
    SHARED_KIB,
    TRITON_TYPES,
    _own_cache,  # noqa: F401
    limits,
)

H200 = DeviceLimits(num_multiprocessors=132, max_shared_bytes=227 * 1024)
# Qwen3-4B.
HIDDEN, INTERMEDIATE, VOCABULARY = 2560, 9728, 151936
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
POINTERS = {
    "parts": "fp32",
    "tile_values": "fp32",
    "tile_ids": "i32",
    "next_ids": "i64",
    "next_logits": "fp32",
    "best_logits": "fp32",
    "token_ids": "i64",
    "eos_ids": "i64",
    "partial_acc": "fp32",
    "partial_sums": "fp32",
    "arrivals": "i32",
    **dict.fromkeys(["positions", "remaining", "outputs", "step", "block_table", "page_offset"], "i32"),
}
MODEL_POINTERS = (
    "x",
    "weight",
    "bias",
    "out",
    "table",
    "residual",
    "summed",
    "cos",
    "sin",
    "q_norm",
    "k_norm",
)
MODEL_POINTERS += ("pages", "gate_up", "logits")


def compile_kernel(kernel, capability, dtype, constants, num_warps=4, **pointers):
    """As launched: every tensor starts at a multiple of 16 bytes, so that loads can be wide and pipelined."""
    types = POINTERS | dict.fromkeys(MODEL_POINTERS, TRITON_TYPES[dtype]) | pointers
    constants = constants | {"DEPENDENT": capability >= 90}
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "fp32" if name in ("eps", "scale") else "i32"
        if name in constants:
            signature[name] = "constexpr"
            fixed[(index,)] = constants[name]
        elif name in types:
            signature[name] = "*" + types[name]
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": num_warps} | ({"launch_pdl": True} if capability >= 90 else {})
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def linear_constants(tile, num_rows, num_columns, num_inner, dtype):
    return {
        "N": num_columns,
        "K": num_inner,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_ROWS": decode_linear.block_rows(num_rows),
        "STAGES": tile.num_stages,
        "EXACT": dtype == torch.float32,
    }


def compile_down(capability, dtype, num_rows, num_inner=INTERMEDIATE, has_bias=False):
    shape = torch.Size([HIDDEN, num_inner])
    tile = tiles.choose_split_tile(num_rows, shape, dtype.itemsize, limits(capability))
    constants = linear_constants(tile, num_rows, *shape, dtype)
    constants |= {"SPLITS": tile.splits, "HAS_BIAS": has_bias}
    return compile_kernel(
        decode_linear._linear_kernel, capability, dtype, constants, tile.num_warps, out="fp32"
    )


def compile_gate_up(capability, dtype, num_rows, num_inner=HIDDEN):
    tile = tiles.choose_gated_tile(num_rows, dtype.itemsize, limits(capability))
    constants = linear_constants(tile, num_rows, INTERMEDIATE, num_inner, dtype)
    return compile_kernel(decode_linear._gate_up_kernel, capability, dtype, constants, tile.num_warps)


def compile_head(capability, dtype, num_rows, num_inner=HIDDEN):
    tile = tiles.choose_head_tile(num_rows, dtype.itemsize, limits(capability))
    constants = linear_constants(tile, num_rows, VOCABULARY, num_inner, dtype)
    return compile_kernel(decode_linear._head_kernel, capability, dtype, constants, tile.num_warps)


PRODUCTS = [compile_down, compile_gate_up, compile_head]


def check_large_kernel(compiled, capability, dtype, folder):
    """Fits, fetches ahead 16 bytes a thread, multiplies as exactly as it should, and lets go once it has read."""
    assert 0 < compiled.metadata.shared <= SHARED_KIB[capability] * 1024
    ptx = compiled.asm["ptx"]
    assert "cp.async.cg" in ptx
    if dtype == torch.float32:
        assert "mma" not in ptx
    else:
        assert "wgmma" in ptx or "mma.sync" in ptx or "tcgen05" in ptx
        assert stack_bytes(compiled, folder) <= 16
    assert ("griddepcontrol" in ptx) == (capability >= 90)
    if capability >= 90:
        waits, lets_go = ptx.index("griddepcontrol.wait"), ptx.rindex("griddepcontrol.launch_dependents")
        assert waits < ptx.index("cp.async.cg") < ptx.rindex("cp.async.cg") < lets_go


def stack_bytes(compiled, folder):
    """Registers that are spilled take many of them."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    [size] = re.findall(r" STACK:(\d+) ", usage)
    return int(size)


@pytest.mark.parametrize("compile_product", PRODUCTS)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_products_fit(capability, compile_product, tmp_path):
    """For the most rows that they serve, which take the most memory."""
    compiled = compile_product(capability, torch.bfloat16, MAX_SKINNY_ROWS)
    check_large_kernel(compiled, capability, torch.bfloat16, tmp_path)


@pytest.mark.parametrize(
    ("capability", "compile_product"), [(86, compile_down), (86, compile_head), (90, compile_gate_up)]
)
def test_products_in_float32_fit(capability, compile_product, tmp_path):
    compiled = compile_product(capability, torch.float32, MAX_SKINNY_ROWS)
    check_large_kernel(compiled, capability, torch.float32, tmp_path)


@pytest.mark.parametrize("compile_product", PRODUCTS)
@pytest.mark.parametrize("options", [{"num_rows": 1}, {"num_rows": 33, "num_inner": 2576}], ids=str)
def test_products_of_other_sizes_fit(compile_product, options, tmp_path):
    check_large_kernel(compile_product(90, torch.float16, **options), 90, torch.float16, tmp_path)


def test_a_bias_costs_no_spill(tmp_path):
    check_large_kernel(compile_down(90, torch.bfloat16, 64, has_bias=True), 90, torch.bfloat16, tmp_path)


def compile_attention(
    capability, dtype, page_size=256, window=0, has_norm=True, num_programs=132, is_chunked=False
):
    tile = tiles.choose_rotated_attention_tile(num_programs, HEAD_DIM, dtype.itemsize, limits(capability))
    constants = {
        "NUM_HEADS": HEADS,
        "NUM_KV_HEADS": KV_HEADS,
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
    return compile_kernel(kernel, capability, dtype, constants, tile.num_warps)


@pytest.mark.parametrize(
    ("num_programs", "is_chunked"), [(132, False), (132, True), (2048, False), (2048, True)]
)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_attention_fits(capability, num_programs, is_chunked, tmp_path):
    kernel = compile_attention(capability, torch.bfloat16, num_programs=num_programs, is_chunked=is_chunked)
    check_large_kernel(kernel, capability, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("capability", [86, 90])
def test_attention_in_float32_fits(capability, tmp_path):
    check_large_kernel(compile_attention(capability, torch.float32), capability, torch.float32, tmp_path)


@pytest.mark.parametrize("capability", [86, 90])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16},
        {"page_size": 4, "has_norm": False},
        {"window": 4096},
        {"window": 100, "page_size": 32},
        {"num_programs": 2048},
    ],
    ids=str,
)
def test_variants_of_attention_fit(capability, options, tmp_path):
    compiled = compile_attention(capability, torch.bfloat16, **options)
    check_large_kernel(compiled, capability, torch.bfloat16, tmp_path)


ROTATE = {
    "NUM_HEADS": HEADS,
    "NUM_KV_HEADS": KV_HEADS,
    "HEAD_DIM": HEAD_DIM,
    "SPLITS": 2,
    "HEADS": 8,
    "HALF": 64,
}
SMALL_KERNELS = {
    "embed_norm": (decode_norms._embed_norm_kernel, {"N": HIDDEN, "BLOCK": 4096}, 8),
    "add_norm": (decode_norms._add_norm_kernel, {"N": HIDDEN, "BLOCK": 4096, "SPLITS": 4}, 8),
    "rotate": (projected_heads._rotate_kernel, ROTATE | {"HAS_NORM": True, "HAS_ROTARY": True}, 2),
    "rotate_llama": (projected_heads._rotate_kernel, ROTATE | {"HAS_NORM": False, "HAS_ROTARY": True}, 2),
    "silu_product": (gated_silu._silu_product_kernel, {"N": INTERMEDIATE, "BLOCK": 2048}, 4),
    "tile_maxima": (decode_finish._tile_maxima_kernel, {"N": VOCABULARY, "BLOCK": 4096}, 4),
    "best_token": (decode_finish._best_token_kernel, {"BLOCK": 4096}, 4),
    "advance": (decode_finish._advance_kernel, {"NUM_EOS": 2, "BLOCK": 256}, 1),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", SMALL_KERNELS)
def test_small_kernels_let_their_successor_go_at_once(name, capability):
    kernel, constants, num_warps = SMALL_KERNELS[name]
    ptx = compile_kernel(kernel, capability, torch.bfloat16, constants, num_warps).asm["ptx"]
    if capability < 90:
        assert "griddepcontrol" not in ptx
        return
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
    # What the predecessor makes is not read before it has ended.
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]


# Which tiles are chosen


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((6144, 2560), 2),
        ((2560, 4096), 4),
        ((2560, 9728), 4),
        ((1024, 128), 2),
        ((32000, 2560), 1),
        ((64, 8192), 8),
    ],
)
def test_products_of_few_columns_are_split(shape, splits):
    assert tiles.choose_split_tile(32, torch.Size(shape), 2, H200).splits == splits


def test_smaller_devices_split_less():
    small = DeviceLimits(num_multiprocessors=30, max_shared_bytes=99 * 1024)
    assert tiles.choose_split_tile(32, torch.Size([2560, 9728]), 2, small).splits == 1


@pytest.mark.parametrize("num_rows", [1, 32, 64])
def test_the_measured_tiles_are_those_of_an_h200(num_rows):
    """Whatever smaller cards need, these do not change but by measuring."""

    def cut(tile):
        return (tile.block_n, tile.block_k, tile.num_warps, tile.num_stages)

    assert cut(tiles.choose_split_tile(num_rows, torch.Size([2560, 9728]), 2, H200)) == (64, 128, 4, 4)
    assert cut(tiles.choose_split_tile(num_rows, torch.Size([2560, 4096]), 2, H200)) == (64, 128, 4, 4)
    assert cut(tiles.choose_split_tile(num_rows, torch.Size([6144, 2560]), 2, H200)) == (64, 128, 4, 3)
    assert cut(tiles.choose_gated_tile(num_rows, 2, H200)) == (32, 128, 4, 3)
    assert cut(tiles.choose_head_tile(num_rows, 2, H200)) == (64, 128, 4, 4)


@pytest.mark.parametrize(
    ("num_rows", "weight_shape", "is_split"),
    [
        (256, (2560, 9728), True),  # 28.5 us with the norm that follows, against 29.6
        (256, (2560, 4096), False),  # 16.6 against 14.9
        (128, (2560, 9728), True),  # 19.8 against 22.2
        (128, (2560, 4096), True),  # 11.3 against 12.6
        (256, (6144, 2560), False),
        (256, (19456, 2560), False),
        (8192, (2560, 9728), False),
    ],
)
def test_large_products_that_are_split(num_rows, weight_shape, is_split):
    """As measured on an H200."""
    assert tiles.splits_large_product(num_rows, torch.Size(weight_shape), H200) == is_split


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 17, 64])
def test_small_cards_get_smaller_tiles(num_rows, itemsize):
    shared_bytes = 99 * 1024
    small = DeviceLimits(num_multiprocessors=30, max_shared_bytes=shared_bytes)
    chosen = {
        tiles.choose_split_tile(num_rows, torch.Size([2560, 9728]), itemsize, small): 64,
        tiles.choose_gated_tile(num_rows, itemsize, small): 2 * 32,
        tiles.choose_head_tile(num_rows, itemsize, small): 64,
    }
    for tile, weight_rows in chosen.items():
        tile_rows = weight_rows + decode_linear.block_rows(num_rows)
        assert tile.num_stages >= 2
        assert tile_rows * tile.block_k * itemsize * tile.num_stages <= shared_bytes


@pytest.mark.parametrize(
    ("num_programs", "head_dim", "itemsize", "shared_kib", "expected"),
    [
        (128, 128, 2, 227, AttentionTile(64, 4, 3)),
        (256, 128, 2, 227, AttentionTile(64, 4, 3)),
        (512, 128, 2, 227, AttentionTile(32, 2, 4)),
        (1024, 128, 2, 227, AttentionTile(32, 2, 4)),
        (2048, 128, 2, 227, AttentionTile(16, 1, 6)),
        (128, 128, 2, 99, AttentionTile(64, 4, 3)),
        (512, 128, 2, 99, AttentionTile(32, 2, 2)),
        (2048, 128, 2, 99, AttentionTile(16, 1, 3)),
        (256, 256, 4, 99, AttentionTile(16, 1, 2)),
        (2048, 256, 4, 99, AttentionTile(16, 1, 2)),
    ],
)
def test_tokens_of_an_attention_tile(num_programs, head_dim, itemsize, shared_kib, expected):
    device = DeviceLimits(num_multiprocessors=132, max_shared_bytes=shared_kib * 1024)
    tile = tiles.choose_rotated_attention_tile(num_programs, head_dim, itemsize, device)
    assert tile == expected


@pytest.mark.parametrize(
    ("num_programs", "num_slots", "expected"),
    [
        (8, 1024, 256),
        (32, 8704, 512),
        (64, 8704, 1024),
        (128, 8704, 2048),
        (256, 1024, 2048),
        (256, 8704, 2048),
        (512, 8704, 4096),
        (2048, 8704, 16384),
        (8, 32768, 256),
        (1, 100, 256),
    ],
)
def test_chunks_of_attention(num_programs, num_slots, expected):
    chunk = tiles.choose_attention_chunk(num_programs, num_slots, H200)
    assert chunk == expected
    assert num_programs * -(-num_slots // chunk) <= max(num_programs, 17 * H200.num_multiprocessors)


def test_attention_has_tiles_in_flight():
    """A wait for all copies but the newest, in the main loop: of pages found in the same iteration it is for all."""
    ptx = compile_attention(90, torch.bfloat16, num_programs=2048).asm["ptx"]
    in_flight = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    assert max(in_flight) >= 2
