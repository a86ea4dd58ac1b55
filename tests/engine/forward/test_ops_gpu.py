"""On a CUDA device: the fused operators at the sizes of Qwen3-4B against plain torch in fp32."""

from __future__ import annotations

import pytest
import torch

from cbexp.engine import fused_ops, fused_reference
from cbexp.engine.attention_reference import paged_decode_reference
from cbexp.engine.fused_ops import MAX_SKINNY_ROWS
from tests.engine.fused_kernel_cases import EPS, randn, rotary_tables
from tests.engine.paged_attention_cases import build_case

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HIDDEN, INTERMEDIATE, VOCABULARY = 2560, 9728, 151936
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
# A kernel of each tile (16, 32 and 64 rows), both sides of the bound from which products are the vendor's, and a batch
# that fills a device. Each is compiled anew for each type, which takes a second: the other types have a tile and a
# vendor's product each.
SIZES = [
    *((rows, torch.bfloat16) for rows in (1, 4, 32, MAX_SKINNY_ROWS, MAX_SKINNY_ROWS + 1, 256)),
    (4, torch.float16),
    (4, torch.float32),
    (MAX_SKINNY_ROWS + 1, torch.float32),
]
# For variants of what the sizes above have gone through.
FEW_SIZES = [(32, torch.bfloat16), (MAX_SKINNY_ROWS + 1, torch.bfloat16)]
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 3e-2, "atol": 4e-2},
    torch.float16: {"rtol": 4e-3, "atol": 8e-3},
}


@pytest.fixture(autouse=True)
def _exact_fp32():
    """TF32 would round the two sides differently."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def tensor(*shape, dtype, seed=0):
    return randn(*shape, dtype=dtype, device=DEVICE, seed=seed)


def matrix(out_features, in_features, dtype, seed=1):
    """Scaled so that products are about one, as behind a norm."""
    return (tensor(out_features, in_features, dtype=torch.float32, seed=seed) / in_features**0.5).to(dtype)


def norm_weight(size, dtype, seed=2):
    return 1 + 0.1 * tensor(size, dtype=dtype, seed=seed)


def widened(arguments):
    return [
        each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in arguments
    ]


def check(name, *arguments, dtype):
    """An operator against its reference in fp32, from the same rounded inputs."""
    actual = getattr(fused_ops, name)(*arguments)
    expected = getattr(fused_reference, name)(*widened(arguments))
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    for own, plain in pairs:
        assert own.dtype == dtype
        torch.testing.assert_close(own.float(), plain, **TOLERANCES[dtype])


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_embedding(rows, dtype):
    token_ids = torch.arange(rows, device=DEVICE) * 7919 % 4000
    table = tensor(4000, HIDDEN, dtype=dtype)
    check("embed_norm", token_ids, table, norm_weight(HIDDEN, dtype), EPS, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "dtype", "in_features"),
    [
        *((*size, HEADS * HEAD_DIM) for size in SIZES),
        *((*size, in_features) for size in FEW_SIZES for in_features in (INTERMEDIATE, 2576)),
    ],
    ids=str,
)
def test_projection_and_residual(rows, in_features, dtype):
    x, weight = tensor(rows, in_features, dtype=dtype), matrix(HIDDEN, in_features, dtype)
    residual = tensor(rows, HIDDEN, dtype=dtype, seed=3)
    bias = tensor(HIDDEN, dtype=dtype, seed=4) if in_features == 2576 else None
    check("project_add_norm", x, weight, bias, residual, norm_weight(HIDDEN, dtype), EPS, dtype=dtype)


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_gate_and_up(rows, dtype):
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(2 * INTERMEDIATE, HIDDEN, dtype)
    check("gated_projection", x, weight, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "dtype", "is_qwen3"),
    [*((*size, True) for size in SIZES), *((*size, False) for size in FEW_SIZES)],
    ids=str,
)
def test_queries_keys_and_values(rows, is_qwen3, dtype):
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(WIDTH, HIDDEN, dtype)
    bias = None if is_qwen3 else tensor(WIDTH, dtype=dtype, seed=3)
    norms = [norm_weight(HEAD_DIM, dtype, seed) for seed in (4, 5)] if is_qwen3 else [None, None]
    positions = (torch.arange(rows, device=DEVICE, dtype=torch.int32) * 37) % 500 - 1
    rotary = rotary_tables(500, HEAD_DIM, dtype, DEVICE)
    arguments = [x, weight, bias, positions, *rotary, *norms, EPS, HEADS, KV_HEADS]
    check("rotated_projection", *arguments, dtype=dtype)


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_best_token(rows, dtype):
    """Of logits that differ by less than a rounding, any may be chosen."""
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(VOCABULARY, HIDDEN, dtype)
    logits = x.float() @ weight.float().T
    chosen, values = fused_ops.best_tokens(x, weight)
    of_chosen = logits.gather(1, chosen[:, None])[:, 0]
    assert (logits.amax(1) - of_chosen).max() <= TOLERANCES[dtype]["atol"]
    assert (chosen.dtype, values.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(values, of_chosen, **TOLERANCES[dtype])
    assert values.to(dtype).float().equal(values)  # the model's own logits are rounded


@pytest.mark.parametrize("rows", [4, MAX_SKINNY_ROWS, MAX_SKINNY_ROWS + 1])
def test_of_equal_logits_the_lowest_id_wins(rows):
    x = torch.ones(rows, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.zeros(32003, 64, device=DEVICE, dtype=torch.bfloat16)
    for ids in ([32002, 17], [63, 64], [4095, 4096], [5, 6, 7]):
        weight.zero_()[ids] = 1.0
        chosen, values = fused_ops.best_tokens(x, weight)
        assert (chosen.tolist(), values.tolist()) == ([min(ids)] * rows, [64.0] * rows)


@pytest.mark.parametrize("rows", [4, MAX_SKINNY_ROWS + 1])
def test_nan_of_one_row_stays_there(rows):
    """Its token is one of the vocabulary: the next step looks its embedding up."""
    dtype, num_tokens = torch.bfloat16, 32003
    x = tensor(rows, HIDDEN, dtype=dtype)
    head, gate_up, down = (matrix(n, HIDDEN, dtype) for n in (num_tokens, 2 * 1024, HIDDEN))
    residual, norm = tensor(rows, HIDDEN, dtype=dtype, seed=3), norm_weight(HIDDEN, dtype)

    def run(x):
        return [
            *fused_ops.best_tokens(x, head),
            fused_ops.gated_projection(x, gate_up),
            *fused_ops.project_add_norm(x, down, None, residual, norm, EPS),
        ]

    clean = run(x)
    x[0] = float("nan")
    poisoned = run(x)
    assert 0 <= int(poisoned[0][0]) < num_tokens
    assert not poisoned[1][0].isfinite()
    for before, after in zip(clean, poisoned, strict=True):
        assert after[1:].equal(before[1:])


# Attention


def attention_arguments(positions, dtype, *, is_qwen3=True, head_dim=HEAD_DIM, window=0, page_size=64):
    """Of `fused_ops.attend_new_token`; every slot that no row has written holds NaN."""
    rows, width = len(positions), (HEADS + 2 * KV_HEADS) * head_dim
    paged = build_case(
        positions,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=DEVICE,
        window=window,
    )
    norms = [norm_weight(head_dim, dtype, seed) for seed in (4, 5)] if is_qwen3 else [None, None]
    projection = [tensor(rows, HIDDEN, dtype=dtype), matrix(width, HIDDEN, dtype), None, paged.positions]
    rotary = rotary_tables(max(positions) + 1, head_dim, dtype, DEVICE)
    arrivals = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device=DEVICE)
    cache = [paged.pages, paged.block_table, paged.page_offset, arrivals]
    return [*projection, *rotary, *norms, *cache, EPS, head_dim**-0.5, window, HEADS]


def expected_attention(arguments):
    """In fp32 from the same rounded inputs: the output, and the pages left behind."""
    *projection, pages, block_table, page_offset, _, eps, scaling, window, heads = widened(arguments)
    positions, pages = arguments[3], pages.clone()
    qkv = fused_reference.rotated_projection(*projection, eps, heads, KV_HEADS)
    query, key, value = qkv.split([heads, KV_HEADS, KV_HEADS], dim=1)
    output = paged_decode_reference(
        query, key, value, pages, block_table, positions, page_offset, scaling=scaling, window=window
    )
    return output.flatten(1), pages


def check_pages(pages, expected, before, dtype):
    torch.testing.assert_close(pages.float(), expected, **TOLERANCES[dtype], equal_nan=True)
    # Old keys and values, and slots of nobody, are bit for bit what they were.
    is_new = expected.ne(before.float()) & ~(expected.isnan() & before.isnan())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    is_kept = pages.view(bits).eq(before.view(bits)).all(-1)
    assert (is_kept | is_new.any(-1)).all()


def check_attention(arguments, dtype):
    expected, expected_pages = expected_attention(arguments)
    before = arguments[8].clone()
    output = fused_ops.attend_new_token(*arguments)
    torch.testing.assert_close(output.float(), expected, **TOLERANCES[dtype])
    # Slice by slice: a comparison takes ten times the memory of what it compares.
    slices = (pages.split(256) for pages in (arguments[8], expected_pages, before))
    for after, wanted, old in zip(*slices, strict=True):
        check_pages(after, wanted, old, dtype)
    inactive = arguments[3] < 0
    assert not output[inactive].any()
    assert not arguments[11].any()


def spread_positions(rows):
    """Empty, full and partly filled pages, with inactive rows between; the first is active."""
    return [400 if row == 0 else (row * 53) % 402 - 1 for row in range(rows)]


@pytest.mark.parametrize(
    ("rows", "dtype", "is_qwen3"),
    [*((*size, True) for size in SIZES), *((*size, False) for size in FEW_SIZES)],
    ids=str,
)
def test_attention(rows, is_qwen3, dtype):
    check_attention(attention_arguments(spread_positions(rows), dtype, is_qwen3=is_qwen3), dtype)


@pytest.mark.parametrize(
    ("rows", "window", "page_size"),
    [(4, 0, 16), (64, 100, 16), (4, 256, 32), (64, 0, 32), (4, 100, 256), (64, 256, 256)],
)
def test_attention_in_pages_and_windows(rows, window, page_size):
    dtype = torch.bfloat16
    arguments = attention_arguments(spread_positions(rows), dtype, window=window, page_size=page_size)
    check_attention(arguments, dtype)


@pytest.mark.parametrize(("rows", "head_dim"), [(64, 64), (64, 80), (64, 96), (64, 256), (4, 80), (4, 256)])
def test_attention_of_other_head_sizes(rows, head_dim):
    dtype = torch.bfloat16
    check_attention(attention_arguments(spread_positions(rows), dtype, head_dim=head_dim), dtype)


@pytest.mark.parametrize(("rows", "longest"), [(1, 9000), (2, 5000), (16, 3001), (64, 4500), (256, 2000)])
def test_attention_of_rows_of_all_lengths(rows, longest):
    """Rows of many chunks beside rows of one, twice: the second run finds what the first has left."""
    dtype = torch.bfloat16
    positions = [longest - 1, *((row * 7919) % (longest // (1 + row % 7)) for row in range(1, rows))]
    arguments = attention_arguments(positions, dtype)
    check_attention(arguments, dtype)
    arguments[3] -= (arguments[3] > 0).int()
    check_attention(arguments, dtype)


@pytest.mark.parametrize("rows", [4, 64])
def test_nan_of_one_row_stays_there_in_attention(rows):
    dtype = torch.bfloat16
    positions = [300] * rows
    clean = fused_ops.attend_new_token(*attention_arguments(positions, dtype))
    arguments = attention_arguments(positions, dtype)
    arguments[0][1] = float("nan")
    entries = arguments[9][1].long()
    for page in (*entries + 2, *entries + 3):
        arguments[8][page] = float("nan")
    output = fused_ops.attend_new_token(*arguments)
    others = [row for row in range(rows) if row != 1]
    assert output[1].isnan().all()
    assert output[others].equal(clean[others])
