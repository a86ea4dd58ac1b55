"""On a CUDA device: the operators at the sizes of Qwen3-4B against plain torch in wider numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

from cbexp.engine import sampling
from cbexp.engine.attention import paged_decode_reference
from cbexp.engine.forward import ops, products, reference
from cbexp.engine.kernels.tiles import MAX_SKINNY_ROWS
from tests.engine.graph_capture import capture
from tests.engine.kernels.cases import EPS, build_paged_case, check_advance, randn, rotary_tables

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_fp32")]

DEVICE = "cuda"
HIDDEN, INTERMEDIATE, VOCABULARY = 2560, 9728, 151936
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
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


def tensor(*shape, dtype, seed=0):
    return randn(*shape, dtype=dtype, device=DEVICE, seed=seed)


def matrix(out_features, in_features, dtype, seed=1):
    """Scaled so that products are about one, as behind a norm."""
    return (tensor(out_features, in_features, dtype=torch.float32, seed=seed) / in_features**0.5).to(dtype)


def qkv(dtype, head_dim=HEAD_DIM, has_bias=False):
    """Weights and biases of the queries, keys and values."""
    sizes = [heads * head_dim for heads in (HEADS, KV_HEADS, KV_HEADS)]
    # Small: heads without a norm are as long as they come, and what rounds them counts in the softmax.
    biases = [tensor(n, dtype=dtype, seed=3) / 4 for n in sizes] if has_bias else []
    return [matrix(n, HIDDEN, dtype, seed) for seed, n in enumerate(sizes)], biases


def norm_weight(size, dtype, seed=2):
    return 1 + 0.1 * tensor(size, dtype=dtype, seed=seed)


def widened(arguments, dtype=torch.float32):
    """Exact copies: what is computed from them is the oracle."""

    def widen(each):
        return each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each

    return tree_map(widen, arguments)


def check(name, *arguments, dtype):
    """An operator against its reference in fp32, from the same rounded inputs."""
    operator = getattr(ops, name)
    actual, expected = operator(*arguments), getattr(reference, name)(*widened(arguments))
    if isinstance(actual, torch.Tensor):
        actual, expected = [actual], [expected]
    for own, plain in zip(actual, expected, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.float(), plain, **TOLERANCES[dtype])
    # What the compiler assumes of shapes and strides.
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_operators_of_a_layer(rows, dtype):
    has_variants = (rows, dtype) in FEW_SIZES
    x, norm = tensor(rows, HIDDEN, dtype=dtype), norm_weight(HIDDEN, dtype)
    token_ids = torch.arange(rows, device=DEVICE) * 7919 % 4000
    check("embed_norm", token_ids, tensor(4000, HIDDEN, dtype=dtype), norm, EPS, dtype=dtype)

    gate, up = (matrix(INTERMEDIATE, HIDDEN, dtype, n) for n in (1, 2))
    check("gated_projection", x, gate, up, dtype=dtype)
    check("gated_projection", x, up, gate, dtype=dtype)

    residual, bias = (tensor(*shape, dtype=dtype, seed=3) for shape in ((rows, HIDDEN), (HIDDEN,)))
    for in_features in (HEADS * HEAD_DIM, *((INTERMEDIATE, 2576) if has_variants else ())):
        product = tensor(rows, in_features, dtype=dtype), matrix(HIDDEN, in_features, dtype)
        other = residual, norm, EPS
        check("project_add_norm", *product, bias if in_features == 2576 else None, *other, dtype=dtype)

    positions = (torch.arange(rows, device=DEVICE, dtype=torch.int32) * 37) % 500 - 1
    rotary = rotary_tables(500, HEAD_DIM, dtype, DEVICE)
    for is_qwen3 in (True, False) if has_variants else (True,):
        norms = [norm_weight(HEAD_DIM, dtype, seed) for seed in (4, 5)] if is_qwen3 else [None, None]
        projection = x, *qkv(dtype, has_bias=not is_qwen3)
        check("rotated_projection", *projection, positions, *rotary, *norms, EPS, dtype=dtype)

    # Of inputs with more dimensions than two, and of one whose rows have gaps between them.
    wide = tensor(2, rows, HIDDEN, dtype=dtype)
    for has_bias in (False, True):
        check("joint_linear", wide[:, : rows // 2 + 1], *qkv(dtype, has_bias=has_bias), dtype=dtype)
    check("joint_linear", wide[0], [matrix(n, HIDDEN, dtype, n) for n in (48, 1000)], [], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("gap", [0, 5 * 2**30], ids=["neighbours", "far apart"])
def test_products_over_two_addresses(gap, order, dtype):
    """In both orders, captured too, of memory that is written later; the distance may need more than 32 bits."""
    n, outputs = 1024, []
    x = tensor(MAX_SKINNY_ROWS + 1, HIDDEN, dtype=dtype)
    block = torch.empty(2 * n * HIDDEN + gap, dtype=dtype, device=DEVICE)
    weights = [block[: n * HIDDEN].view(n, HIDDEN), block[-n * HIDDEN :].view(n, HIDDEN)][::order]

    graph = capture(lambda: outputs.append(products._multiply_pair(x, *weights)))
    for seed in (0, 2):
        for index, weight in enumerate(weights):
            weight.copy_(matrix(n, HIDDEN, dtype, seed + index))
        graph.replay()
        for pair in (outputs[-1], products._multiply_pair(x, *weights)):
            for weight, product in zip(weights, pair, strict=True):
                expected = x.double() @ weight.double().T
                torch.testing.assert_close(product.double(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_best_token(rows, dtype):
    """Of logits that differ by less than a rounding, any may be chosen."""
    x, weight = tensor(rows, HIDDEN, dtype=dtype), matrix(VOCABULARY, HIDDEN, dtype)
    logits = x.float() @ weight.float().T
    chosen, values = sampling.choose_from_hidden(x, weight)
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
        chosen, values = sampling.choose_from_hidden(x, weight)
        assert (chosen.tolist(), values.tolist()) == ([min(ids)] * rows, [64.0] * rows)


@pytest.mark.parametrize("rows", [4, MAX_SKINNY_ROWS + 1])
def test_nan_of_one_row_stays_there(rows):
    """Its token is one of the vocabulary: the next step looks its embedding up."""
    dtype, num_tokens = torch.bfloat16, 32003
    x = tensor(rows, HIDDEN, dtype=dtype)
    head, gate, up, down = (matrix(n, HIDDEN, dtype, n) for n in (num_tokens, 1024, 1024, HIDDEN))
    residual, norm = tensor(rows, HIDDEN, dtype=dtype, seed=3), norm_weight(HIDDEN, dtype)

    def run(x):
        return [
            *sampling.choose_from_hidden(x, head),
            ops.gated_projection(x, gate, up),
            *ops.project_add_norm(x, down, None, residual, norm, EPS),
            *ops.joint_linear(x, [gate, up], []),
        ]

    clean = run(x)
    x[0] = float("nan")
    poisoned = run(x)
    assert 0 <= int(poisoned[0][0]) < num_tokens
    assert not poisoned[1][0].isfinite()
    for before, after in zip(clean, poisoned, strict=True):
        assert after[1:].equal(before[1:])


@pytest.mark.parametrize("rows", [1, 70, 1024])
def test_rows_advance_as_in_plain_torch(rows):
    check_advance(sampling.advance, rows, (2, 5), DEVICE)


# Attention


def attention_inputs(positions, dtype, is_qwen3=True, head_dim=HEAD_DIM, window=0, page_size=64):
    """What makes heads, and pages in which every slot that no row has written holds NaN."""
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": head_dim, "page_size": page_size}
    paged = build_paged_case(positions, **shape, dtype=dtype, device=DEVICE, window=window)
    norms = [norm_weight(head_dim, dtype, seed) for seed in (4, 5)] if is_qwen3 else [None, None]
    rotary = rotary_tables(max(positions) + 1, head_dim, dtype, DEVICE)
    x = tensor(len(positions), HIDDEN, dtype=dtype)
    return [x, *qkv(dtype, head_dim, not is_qwen3), paged.positions, *rotary, *norms, EPS], paged


def attend(projection, paged):
    """The output, and the pages left behind."""
    pages = paged.pages.clone()
    arrivals = torch.zeros(len(paged.positions) * KV_HEADS, dtype=torch.int32, device=DEVICE)
    place = pages, paged.block_table, paged.page_offset, arrivals
    output = ops.attend_new_token(*projection, *place, paged.options["scaling"], paged.options["window"])
    assert not arrivals.any()
    return output, pages


def check_pages(pages, expected, before, dtype):
    torch.testing.assert_close(pages.float(), expected, **TOLERANCES[dtype], equal_nan=True)
    # Old keys and values, and slots of nobody, are bit for bit what they were.
    is_new = expected.ne(before.float()) & ~(expected.isnan() & before.isnan())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    is_kept = pages.view(bits).eq(before.view(bits)).all(-1)
    assert (is_kept | is_new.any(-1)).all()


def check_attention(projection, paged):
    """In fp32 from the same rounded inputs."""
    dtype, wide = paged.pages.dtype, replace(paged, pages=paged.pages.float())
    wide.query, wide.key, wide.value = reference.rotated_projection(*widened(projection))
    expected, expected_pages = wide.run(paged_decode_reference)
    output, pages = attend(projection, paged)
    torch.testing.assert_close(output.float(), expected.flatten(1), **TOLERANCES[dtype])
    # Slice by slice: a comparison takes ten times the memory of what it compares.
    for slices in zip(*(each.split(256) for each in (pages, expected_pages, paged.pages)), strict=True):
        check_pages(*slices, dtype)
    assert not output[paged.positions < 0].any()


@pytest.mark.parametrize(
    ("rows", "dtype", "options"),
    [
        *((*size, {}) for size in SIZES),
        *((*size, {"is_qwen3": False}) for size in FEW_SIZES),
        *(
            (4, torch.bfloat16, {"window": window, "page_size": n})
            for window, n in ((0, 16), (256, 32), (100, 256))
        ),
        *(
            (64, torch.bfloat16, {"window": window, "page_size": n})
            for window, n in ((100, 16), (0, 32), (256, 256))
        ),
        *(
            (rows, torch.bfloat16, {"head_dim": n})
            for rows, n in ((64, 64), (64, 80), (65, 96), (4, 80), (4, 256))
        ),
    ],
    ids=str,
)
def test_attention(rows, dtype, options):
    """Empty, full and partly filled pages, with inactive rows between; the first is active."""
    positions = [400 if row == 0 else (row * 53) % 402 - 1 for row in range(rows)]
    check_attention(*attention_inputs(positions, dtype, **options))


@pytest.mark.parametrize(("rows", "longest"), [(1, 9000), (2, 5000), (16, 3001), (64, 4500), (256, 2000)])
def test_attention_of_rows_of_all_lengths(rows, longest):
    """Rows of many chunks beside rows of one."""
    positions = [longest - 1, *((row * 7919) % (longest // (1 + row % 7)) for row in range(1, rows))]
    check_attention(*attention_inputs(positions, torch.bfloat16))


@pytest.mark.parametrize("rows", [4, 64])
def test_nan_of_one_row_stays_there_in_attention(rows):
    projection, paged = attention_inputs([300] * rows, torch.bfloat16)
    clean, _ = attend(projection, paged)
    projection[0][1] = float("nan")
    entries = paged.block_table[1].long()
    for page in (*entries + 2, *entries + 3):
        paged.pages[page] = float("nan")
    output, _ = attend(projection, paged)
    others = [row for row in range(rows) if row != 1]
    assert output[1].isnan().all()
    assert output[others].equal(clean[others])
