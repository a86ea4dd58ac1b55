"""Compiles what the engine launches for every kind of card, without one, with the tiles that such a card would get.

Two kinds in the default suite, the others in the slow one. Cards before the 80s have neither bfloat16 nor asynchronous
copies: there, large tiles spill, which is slow and right.
"""

import os
import re
import subprocess
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cbexp.engine.buffers import SamplingColumn, allocate_buffers, allocate_sampling  # noqa: E402
from cbexp.engine.forward import products  # noqa: E402
from cbexp.engine.kernels import (  # noqa: E402
    finish,
    heads,
    launch,
    linear,
    norms,
    paged_attention,
    read_stream,
    rotated_attention,
    sampling,
    tiles,
)
from cbexp.engine.kernels.tiles import MAX_SKINNY_ROWS  # noqa: E402
from tests.engine.kernels.cases import mostly_slow  # noqa: E402

# Compute capability -> shared memory in KiB that one program may take (CUDA programming guide, compute capabilities).
SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CARDS = mostly_slow(86, 90, *(card for card in SHARED_KIB if card not in (86, 90)), num_fast=2)
# As much as their largest tiles spill.
OLD_STACK_BYTES = {70: 12 * 1024, 75: 4 * 1024}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
TYPES |= {torch.int64: "i64"}
# Qwen3-4B.
HIDDEN, INTERMEDIATE, VOCABULARY = 2560, 9728, 151936
QKV = (4096, 1024, 1024)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def half_of(card):
    return torch.bfloat16 if card >= 80 else torch.float16


def tensor(*shape, dtype):
    """No data: launches are written down, not carried out."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """(card, function, arguments) -> the kernels that the function would launch there, compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_launches(card, function, *args, **kwargs):
        launches = []
        limits = tiles.DeviceLimits(num_multiprocessors=100, max_shared_bytes=SHARED_KIB[card] * 1024)
        monkeypatch.setattr(tiles, "device_limits", lambda device: limits)
        monkeypatch.setattr(paged_attention, "device_limits", lambda device: limits)
        monkeypatch.setattr(launch, "_supports_dependent_launch", lambda device: card >= 90)
        monkeypatch.setattr(
            triton.JITFunction,
            "run",
            lambda kernel, *args, grid, warmup, **kwargs: launches.append((kernel, args, kwargs)),
        )
        function(*args, **kwargs)
        return [compile_launch(card, *each) for each in launches]

    return compile_launches


def compile_launch(card, kernel, args, kwargs):
    """With what Triton would find out of the arguments: types, and which are multiples of 16."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = {name: values.pop(name) for name in list(values) if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            # Every tensor begins at a multiple of 16 bytes, so that loads can be wide and pipelined.
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def check_large_kernel(kernel, card, dtype, folder, max_stack):
    """Fits, fetches ahead 16 bytes a thread, multiplies as exactly as it should, waits before it reads."""
    assert 0 < kernel.metadata.shared <= SHARED_KIB[card] * 1024
    assert stack_bytes(kernel, folder) <= OLD_STACK_BYTES.get(card, max_stack)
    ptx = kernel.asm["ptx"]
    check_target(ptx, card)
    if card < 80:
        assert "bf16" not in ptx
        return
    # "cg" is past the registers, in 16 bytes.
    assert set(re.findall(r"cp\.async\.(\w\w)\.", ptx)) == {"cg"}
    is_multiplied = any(name in ptx for name in ("wgmma", "mma.sync", "tcgen05"))
    assert is_multiplied == (dtype != torch.float32)
    if card >= 90:
        assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")


def check_target(ptx, card):
    assert f".target sm_{card}" in ptx
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == (card >= 90)
    assert ("cp.async" not in ptx) or card >= 80


def stack_bytes(kernel, folder):
    """Registers that are spilled take many of them."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    [size] = re.findall(r" STACK:(\d+) ", usage)
    return int(size)


# Products, for the most rows that the kernels serve, which take the most memory


def project(dtype, rows=MAX_SKINNY_ROWS, sizes=QKV, inner=HIDDEN, has_bias=False):
    biases = [tensor(n, dtype=dtype) for n in sizes] if has_bias else []
    weights = [tensor(n, inner, dtype=dtype) for n in sizes]
    return products.project(tensor(rows, inner, dtype=dtype), weights, biases)


def project_down(dtype, rows=MAX_SKINNY_ROWS, inner=INTERMEDIATE):
    return project(dtype, rows, (HIDDEN,), inner)


def project_gated(dtype, rows=MAX_SKINNY_ROWS, inner=HIDDEN):
    weights = (tensor(INTERMEDIATE, inner, dtype=dtype) for _ in range(2))
    return products.project_gated(tensor(rows, inner, dtype=dtype), *weights)


def find_best(dtype, rows=MAX_SKINNY_ROWS, inner=HIDDEN):
    x, weight = tensor(rows, inner, dtype=dtype), tensor(VOCABULARY, inner, dtype=dtype)
    limits = tiles.device_limits(x.device)
    return linear.head_maxima(x, weight, tiles.choose_head_tile(rows, x.itemsize, limits))


# Attention


def paged_arguments(dtype, rows, table_width, page_size, head_dim):
    """Pages, block table and page offset."""
    pages = tensor(99, page_size, KV_HEADS, head_dim, dtype=dtype)
    return pages, tensor(rows, table_width, dtype=torch.int32), tensor(dtype=torch.int32)


def attend_rotated(dtype, rows=16, table_width=8, page_size=256, window=0, has_norm=True):
    parts = [tensor(2, rows, n, dtype=torch.float32) for n in QKV]
    tables = [tensor(4096, HEAD_DIM, dtype=dtype)] * 2
    norm = tensor(HEAD_DIM, dtype=dtype) if has_norm else None
    positions, arrivals = (tensor(rows * KV_HEADS, dtype=torch.int32) for _ in range(2))
    place = *paged_arguments(dtype, rows, table_width, page_size, HEAD_DIM), arrivals
    limits, num_programs = tiles.device_limits(arrivals.device), rows * KV_HEADS
    cut = {
        "tile": tiles.choose_rotated_attention_tile(num_programs, HEAD_DIM, dtype.itemsize, limits),
        "chunk": tiles.choose_attention_chunk(num_programs, window or table_width * page_size, limits),
    }
    heads = *parts, positions, *tables, norm, norm
    rotated_attention.rotated_paged_attention(*heads, *place, eps=1e-6, scaling=0.1, window=window, **cut)


def attend_paged(dtype, rows=64, head_dim=128, page_size=256, group=4, sinks=False, **options):
    num_heads = group * KV_HEADS
    heads = [tensor(rows, n, head_dim, dtype=dtype) for n in (num_heads, KV_HEADS, KV_HEADS)]
    pages, table, offset = paged_arguments(dtype, rows, 128, page_size, head_dim)
    place = pages, table, tensor(rows, dtype=torch.int32), offset
    options["sinks"] = tensor(num_heads, dtype=dtype) if sinks else None
    paged_attention.paged_decode_attention(*heads, *place, 0.1, **options)


PRODUCTS = [project, project_down, project_gated, find_best]
LONG = {"table_width": 128}  # rows of several chunks
CASES = [
    *((multiply, {}) for multiply in PRODUCTS),
    (project, {"has_bias": True}),
    (project, {"sizes": (4096, 1000, 1000)}),
    (attend_rotated, {}),
    (attend_rotated, {"rows": 256} | LONG),
    (attend_paged, {}),
    # Of few rows, each is split.
    (attend_paged, {"rows": 2, "sinks": True, "window": 1000}),
    # In the slow suite:
    *((multiply, {"rows": 1, "dtype": torch.float16}) for multiply in PRODUCTS),
    *((multiply, {"rows": 33, "inner": 2576}) for multiply in PRODUCTS),
    (attend_rotated, {"page_size": 4, "has_norm": False}),
    *((attend_rotated, {"window": window, "page_size": n}) for window, n in ((4096, 16), (100, 32))),
    *((attend_paged, {"head_dim": head_dim, "softcap": 50.0}) for head_dim in (64, 80, 256)),
    (attend_paged, {"window": 4096, "page_size": 16, "rows": 2}),
    (attend_paged, {"page_size": 16, "group": 64}),
    *((function, {"dtype": torch.float32}) for function in (*PRODUCTS, attend_rotated, attend_paged)),
    *((attend_paged, {"dtype": torch.float32, "head_dim": head_dim}) for head_dim in (64, 256)),
]


@pytest.mark.parametrize(
    ("function", "options"),
    mostly_slow(*CASES, num_fast=10),
    ids=lambda each: getattr(each, "__name__", str(each)),  # the same in every process
)
@pytest.mark.parametrize("card", CARDS)
def test_large_kernels(card, function, options, compiled, tmp_path):
    options = {"dtype": half_of(card)} | options
    kernel, *combining = compiled(card, function, **options)
    max_stack = 0 if function is attend_paged else 16
    if function in PRODUCTS and options["dtype"] == torch.float32:
        max_stack = 4 * 1024  # without tensor cores, large tiles spill
    check_large_kernel(kernel, card, options["dtype"], tmp_path, max_stack)
    assert len(combining) == (options.get("rows") == 2)
    assert all(stack_bytes(each, tmp_path) == 0 for each in combining)
    ptx = kernel.asm["ptx"]
    if card >= 90 and function in PRODUCTS:
        assert ptx.rindex("cp.async.cg") < ptx.rindex("griddepcontrol.launch_dependents")
    if card == 90 and function is attend_rotated and "rows" in options:
        # A wait for all copies but the newest, in the main loop: of pages found in the same iteration it is for all.
        assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))) >= 2


@pytest.mark.parametrize("page_size", mostly_slow(16, 256))
def test_paged_attention_has_tiles_in_flight(page_size, compiled):
    """Keys and values of two tiles; page numbers hold nothing up."""
    [kernel] = compiled(90, attend_paged, torch.bfloat16, page_size=page_size)
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg.memdesc<(\d)x64x128xbf16", kernel.asm["ttgir"])
    assert buffers == ["2", "2"]


# Small kernels


def advance(dtype):
    device = torch.device("meta")
    buffers = allocate_buffers({}, max_rows=256, max_burst=8, eos_token_ids=(2, 5), device=device)
    finish.advance(buffers, tensor(200, dtype=torch.int64), tensor(200, dtype=torch.float32))


def advance_sampled(dtype):
    device = torch.device("meta")
    buffers = allocate_buffers({}, max_rows=256, max_burst=8, eos_token_ids=(2, 5), device=device)
    sampling = allocate_sampling(max_rows=256, max_burst=8, vocab_size=VOCABULARY, device=device)
    made = tensor(200, dtype=torch.int64), tensor(200, dtype=torch.float32)
    finish.advance(replace(buffers, sampling=sampling), *made, tensor(200, 4, dtype=torch.float32))


def rotate(dtype, has_norm=False):
    parts, tables = tensor(2, 8, QKV[0], dtype=torch.float32), [tensor(99, HEAD_DIM, dtype=dtype)] * 2
    norm = tensor(HEAD_DIM, dtype=dtype) if has_norm else None
    heads.norm_and_rotate(parts, tensor(8, dtype=torch.int32), *tables, norm, eps=1e-6)


def embed(dtype):
    table, weight = tensor(VOCABULARY, HIDDEN, dtype=dtype), tensor(HIDDEN, dtype=dtype)
    norms.embed_norm(tensor(8, dtype=torch.int64), table, weight, 1e-6)


def add(dtype):
    parts, residual = tensor(4, 8, HIDDEN, dtype=torch.float32), tensor(8, HIDDEN, dtype=dtype)
    norms.add_norm(parts, residual, tensor(HIDDEN, dtype=dtype), 1e-6)


SMALL = {
    "advance": advance,
    "advance, sampled": advance_sampled,
    "rotate": rotate,
    "norm and rotate": lambda dtype: rotate(dtype, has_norm=True),
    "embed": embed,
    "add": add,
    "activate": lambda dtype: linear.silu_product(*(tensor(8, INTERMEDIATE, dtype=dtype) for _ in range(2))),
    "find the largest": lambda dtype: finish.largest_logit(tensor(8, VOCABULARY, dtype=dtype)),
}


@pytest.mark.parametrize("function", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("card", CARDS)
def test_small_kernels_let_their_successor_go_at_once(card, function, compiled, tmp_path):
    for kernel in compiled(card, function, half_of(card)):
        # Nothing but reductions over a program's warps goes through it: many programs fit at once.
        assert kernel.metadata.shared <= 4096
        assert stack_bytes(kernel, tmp_path) == 0
        ptx = kernel.asm["ptx"]
        check_target(ptx, card)
        if card >= 90:
            assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
            # What the predecessor makes is not read before it has ended.
            assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]


@pytest.mark.parametrize("card", CARDS)
def test_the_kernels_that_sample_fit(card, compiled, tmp_path):
    """Nothing is read before the logits are there, and little or nothing spills."""
    words = -(-VOCABULARY // 32)
    rows = [tensor(8, len(SamplingColumn), dtype=torch.int32), tensor(8, dtype=torch.int32)]
    sets = [
        tensor(8, words, dtype=torch.int32),
        tensor(4, words, dtype=torch.int32),
        tensor(2, dtype=torch.int32),
    ]
    kernels = compiled(card, sampling.sample, tensor(8, VOCABULARY, dtype=half_of(card)), *rows, *sets)
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.metadata.shared <= 48 * 1024
        assert stack_bytes(kernel, tmp_path) <= 256
        ptx = kernel.asm["ptx"]
        check_target(ptx, card)
        if card >= 90:
            assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]


@pytest.mark.parametrize("tile", read_stream.READ_TILES, ids=str)
@pytest.mark.parametrize("card", CARDS)
def test_the_bandwidth_probe_reads_16_bytes_a_thread(card, tile, compiled, tmp_path):
    """All loads of a program, unrolled."""
    values, sums = (tensor(2**20, dtype=torch.float32) for _ in range(2))
    [kernel] = compiled(card, read_stream.sum_chunks, values, sums, tile)
    assert stack_bytes(kernel, tmp_path) == 0
    loads = re.findall(r"ld\.global\.v4\.\w32", kernel.asm["ptx"])
    assert len(loads) == tile.chunk_size // (4 * 32 * tile.num_warps)
