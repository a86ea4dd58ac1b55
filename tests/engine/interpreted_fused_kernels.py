"""The fused kernels in Triton's interpreter; run by `test_fused_kernels_interpreted`."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.nn import functional
from triton.runtime import interpreter

from cbexp.engine import fused_reference as reference
from cbexp.engine import sampling
from cbexp.engine.buffers import allocate_buffers
from cbexp.engine.kernels import decode_finish, decode_linear, decode_norms, gated_silu, projected_heads
from cbexp.engine.kernels.attention_tiles import AttentionTile
from cbexp.engine.kernels.decode_linear import LinearTile
from cbexp.engine.kernels.rotated_attention import rotated_paged_attention
from tests.engine.fused_kernel_cases import EPS, build_projected_case, build_rotated_case, randn
from tests.engine.interpreted_paged_attention import _bfloat16_products  # noqa: F401

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
ROWS = [1, 3, 16, 17, 70]
# Of no size below is a tile a divisor; 48 columns are fewer than the parts' tiles together.
OUT_FEATURES, IN_FEATURES = 100, 80
SMALL_TILE = AttentionTile(num_tokens=16, num_warps=4, num_stages=2)


@pytest.fixture(scope="module", autouse=True)
def _bfloat16_rounding():
    """The interpreter cuts float32 off on its way to bfloat16, where a GPU rounds."""
    convert_float = interpreter._convert_float

    def convert(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert_float(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
        return rounded.view(torch.uint16).numpy().reshape(data.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


def close(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype], equal_nan=True)


def close_and_rounded_alike(actual, expected):
    """In half precision nearly every element is equal: values are rounded where the model's own code rounds them."""
    close(actual, expected)
    if expected.dtype != torch.float32:
        assert actual.ne(expected).float().mean() < 0.01


def linear_inputs(rows, dtype=torch.float32, out_features=OUT_FEATURES, in_features=IN_FEATURES):
    """Scaled so that products are about one, as behind a norm."""
    weight = randn(out_features, in_features, seed=1) / in_features**0.5
    return randn(rows, in_features, dtype=dtype), weight.to(dtype)


# Matrix products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*ROWS, 300])
def test_linear(rows, dtype):
    x, weight = linear_inputs(rows, dtype)
    bias = randn(OUT_FEATURES, dtype=dtype, seed=2)
    parts = decode_linear.split_linear(x, weight, bias, LinearTile(32, 32, splits=2))
    assert parts.shape == (2, rows, OUT_FEATURES)
    assert parts.dtype == torch.float32
    close_and_rounded_alike(parts.sum(0).to(dtype), functional.linear(x, weight, bias))


@pytest.mark.parametrize("in_features", [48, 64, IN_FEATURES, 128])
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_of_a_linear_add_up(splits, in_features, has_bias):
    x, weight = linear_inputs(3, in_features=in_features)
    bias = randn(OUT_FEATURES, seed=2) if has_bias else None
    parts = decode_linear.split_linear(x, weight, bias, LinearTile(32, 32, splits=splits))
    columns_each = 32 * math.ceil(in_features / splits / 32)
    for split, part in enumerate(parts):
        columns = slice(split * columns_each, (split + 1) * columns_each)
        close_and_rounded_alike(
            part, functional.linear(x[:, columns], weight[:, columns], bias if split == 0 else None)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up(rows, dtype):
    x, weight = linear_inputs(rows, dtype, out_features=2 * 40)
    close_and_rounded_alike(
        decode_linear.gate_up_silu(x, weight, LinearTile(32, 32)), reference.gated_projection(x, weight)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 40), (17, 40), (3, 2100)], ids=str)
def test_gate_and_up_of_the_vendors_product(shape, dtype):
    rows, width = shape
    gate_up = randn(rows, 2 * width, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    close_and_rounded_alike(gated_silu.silu_product(gate_up), functional.silu(gate) * up)


# The best token


def best_tokens(x, weight):
    return decode_finish.best_token(*decode_linear.head_maxima(x, weight, LinearTile(32, 32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_head(rows, dtype):
    x, weight = linear_inputs(rows, dtype, out_features=333)
    # Of two logits that differ in their order of summation alone, either may be the larger.
    logits = functional.linear(x, weight).float()
    chosen, values = best_tokens(x, weight)
    assert (chosen.dtype, values.dtype) == (torch.int64, torch.float32)
    tolerance = TOLERANCES[dtype]["atol"]
    of_chosen = logits.gather(1, chosen[:, None])
    assert (of_chosen >= logits.amax(1, keepdim=True) - tolerance).all()
    close(values.to(dtype), of_chosen[:, 0].to(dtype))
    assert values.to(dtype).float().equal(values)  # the model's own logits are rounded
    if dtype == torch.float32:
        assert chosen.equal(reference.best_tokens(x, weight)[0])


def test_head_whose_logits_are_all_negative():
    """Zeros beyond the vocabulary do not win."""
    x, weight = torch.ones(2, 16), -torch.ones(37, 16)
    weight[35] *= 0.5
    chosen, values = best_tokens(x, weight)
    assert (chosen.tolist(), values.tolist()) == ([35, 35], [-8.0, -8.0])


@pytest.mark.parametrize("ids", [(0, 1), (5, 31), (31, 32), (40, 36, 99), (99, 2)], ids=str)
def test_of_equal_logits_the_lowest_id_wins(ids):
    # Whole numbers, whose sums do not depend on their order.
    x, weight = (tensor.mul(4).round() for tensor in linear_inputs(3))
    weight[list(ids)] = 3 * x[0]
    logits = functional.linear(x, weight)
    for chosen, values in (best_tokens(x, weight), decode_finish.largest_logit(logits)):
        assert chosen[0] == min(ids)
        assert values.equal(logits.amax(-1))


def test_logits_that_are_equal_once_rounded():
    """The model's logits are of its dtype; 257 is 256 in bfloat16."""
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    weight = torch.full((40, 16), 1.0, dtype=torch.bfloat16)
    weight[7] = weight[33] = 16.0
    weight[33, 0] = 17.0
    for chosen, values in (reference.best_tokens(x, weight), best_tokens(x, weight)):
        assert (chosen.tolist(), values.tolist()) == ([7], [256.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_columns", [1, 100, 4096, 9000])
def test_largest_logit(num_columns, dtype):
    logits = randn(5, num_columns, dtype=dtype)
    logits[1] = -logits[1].abs() - 1
    if num_columns == 9000:
        # Ties within a tile, across tiles, and with the last of all.
        for row, ids in enumerate([(3, 5), (4095, 4096), (8999, 0), (8999, 8192)]):
            logits[row, list(ids)] = 50.0
    chosen, values = decode_finish.largest_logit(logits)
    assert chosen.equal(logits.argmax(-1))
    assert values.dtype == torch.float32
    assert values.equal(logits.float().amax(-1))


@pytest.mark.parametrize("num_columns", [37, 9000])
def test_a_nan_is_no_token_beyond_the_vocabulary(num_columns):
    logits = randn(3, num_columns)
    logits[1] = float("nan")
    chosen, values = decode_finish.largest_logit(logits)
    assert 0 <= chosen[1] < num_columns
    assert not values[1].isfinite()
    assert chosen[[0, 2]].equal(logits[[0, 2]].argmax(-1))
    assert values[[0, 2]].equal(logits[[0, 2]].amax(-1))


@pytest.mark.parametrize("num_tiles", [1, 3, 4, 70])
def test_the_value_is_that_of_the_tile_whose_id_is_taken(num_tiles):
    """In rows of ordinary values, of equal ones, of NaNs alone, and of nothing but minus infinity, as padding is."""
    values = randn(4, num_tiles)
    values[1], values[2], values[3] = -2.5, float("nan"), float("-inf")
    ids = torch.arange(4 * num_tiles, dtype=torch.int32).flip(0).view(4, num_tiles)
    best_ids, best = decode_finish.best_token(values, ids)
    tiles = values[0].argmax().item(), 0
    assert [ids[row, tile] for row, tile in enumerate(tiles)] == best_ids[:2].tolist()
    assert best[:2].tolist() == [values[0].max(), -2.5]
    assert all(best_ids[row] in ids[row] for row in (2, 3))
    assert best[2].isnan()
    assert best[3] == float("-inf")


# Norms, rotation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [16, 80, 1040])
def test_embedding(hidden, dtype):
    table, weight = randn(37, hidden, dtype=dtype), 1 + randn(hidden, dtype=dtype, seed=1)
    token_ids = torch.tensor([36, 0, 5, 5])
    residual, normed = decode_norms.embed_norm(token_ids, table, weight, EPS)
    expected = reference.embed_norm(token_ids, table, weight, EPS)
    assert residual.equal(expected[0])
    close_and_rounded_alike(normed, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_residual(rows, splits, dtype):
    hidden = 80
    parts = randn(splits, rows, hidden, dtype=dtype if splits == 1 else torch.float32)
    residual, weight = randn(rows, hidden, dtype=dtype, seed=1), 1 + randn(hidden, dtype=dtype, seed=2)
    summed, normed = decode_norms.add_norm(parts, residual, weight, EPS)
    expected = residual + parts.float().sum(0).to(dtype)
    close_and_rounded_alike(summed, expected)
    close_and_rounded_alike(normed, reference.rms_norm(summed, weight, EPS))


def rotated(case, **options):
    return projected_heads.norm_and_rotate(
        case.parts,
        case.positions,
        case.rotary,
        case.norms,
        eps=EPS,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        dtype=case.dtype,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_heads(head_dim, rotary, norms, dtype):
    case = build_projected_case(
        [0, 7, -1, 63], heads=6, kv_heads=2, head_dim=head_dim, norms=norms, rotary=rotary, dtype=dtype
    )
    close_and_rounded_alike(rotated(case), case.expected_heads())


@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (3, 3), (16, 2), (17, 1), (70, 2)])
def test_heads_of_many_rows(rows, splits):
    case = build_projected_case(list(range(rows)), splits=splits, heads=2, kv_heads=1)
    close_and_rounded_alike(rotated(case, heads_per_program=2), case.expected_heads())


# Attention


def check_attention(case, chunk=1024, **tile):
    expected, expected_pages = case.expected()
    output, pages = case.run(rotated_paged_attention, chunk=chunk, tile=replace(SMALL_TILE, **tile))
    close(output, expected)
    # Nothing but the new tokens has been written; those are rounded as the heads are.
    is_same = pages.eq(case.paged.pages) | (pages.isnan() & case.paged.pages.isnan())
    was_same = expected_pages.eq(case.paged.pages) | (expected_pages.isnan() & case.paged.pages.isnan())
    assert is_same.all(-1).equal(was_same.all(-1))
    close(pages, expected_pages)
    return output


POSITIONS = [0, 3, 4, -1, 15, 16, 17, 40]


# A chunk for all that a row can store, chunks of which the last may be full or hold nothing but the new token.
CHUNKS = [1024, 16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 1024), (16, 1024), (32, 1024), (4, 32), (16, 16)])
def test_attention(chunk, page_size, norms, dtype):
    case = build_rotated_case(POSITIONS, page_size=page_size, norms=norms, dtype=dtype)
    output = check_attention(case, chunk)
    assert not output[POSITIONS.index(-1)].any()


@pytest.mark.parametrize(
    ("window", "page_size"), [(1, 4), (6, 4), (6, 16), (16, 4), (16, 16), (24, 16), (24, 32), (100, 32)]
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_attention_in_a_window(chunk, window, page_size):
    check_attention(build_rotated_case(POSITIONS, window=window, page_size=page_size), chunk)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (6, 2, 64), (7, 1, 32), (24, 1, 16)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_attention_of_groups(chunk, heads, kv_heads, head_dim):
    check_attention(build_rotated_case([0, 20, 33], heads=heads, kv_heads=kv_heads, head_dim=head_dim), chunk)


@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (3, 4), (16, 2), (17, 1), (70, 2)])
def test_attention_of_many_rows(rows, splits):
    positions = [(5 * row) % 23 - 1 for row in range(rows)]
    positions[0] = 3
    check_attention(build_rotated_case(positions, splits=splits, heads=2, kv_heads=1), num_tokens=32)
    check_attention(build_rotated_case(positions, splits=splits, heads=2, kv_heads=1), chunk=16)


def test_no_active_row_leaves_every_page():
    case = build_rotated_case([5, 9])
    case.projected.positions.fill_(-1)
    output, pages = case.run(rotated_paged_attention, tile=SMALL_TILE)
    assert not output.any()
    assert torch.equal(pages.view(torch.int32), case.paged.pages.view(torch.int32))


# A row's NaNs are its own


def test_nan_of_one_row_stays_there():
    rows, bad = 5, 2
    others = [0, 1, 3, 4]
    x, weight = linear_inputs(rows)
    residual = randn(rows, OUT_FEATURES, seed=3)
    norm_weight = torch.ones(OUT_FEATURES)

    def run(x):
        parts = decode_linear.split_linear(x, weight, None, LinearTile(32, 32, splits=2))
        gated = decode_linear.gate_up_silu(x, weight, LinearTile(32, 32))
        best_ids, values = best_tokens(x, weight)
        return [*decode_norms.add_norm(parts, residual, norm_weight, EPS), gated, values, best_ids]

    expected = run(x)
    for value in (float("nan"), float("inf")):
        poisoned = x.clone()
        poisoned[bad] = value
        for actual, clean in zip(run(poisoned), expected, strict=True):
            assert actual[others].equal(clean[others])
        assert 0 <= run(poisoned)[-1][bad] < OUT_FEATURES
        assert not run(poisoned)[-2][bad].isfinite()


@pytest.mark.parametrize(("window", "chunk"), [(0, 1024), (6, 1024), (0, 16), (24, 16)])
def test_nan_of_one_row_stays_there_in_attention(window, chunk):
    case = build_rotated_case([29, 35, 12], window=window)
    expected, _ = case.run(rotated_paged_attention, chunk=chunk, tile=SMALL_TILE)
    case.projected.parts[:, 1] = float("nan")
    entries = case.paged.block_table[1].long()
    for page in (*entries + 2, *entries + 3):
        case.paged.pages[page] = float("nan")
    output, _ = case.run(rotated_paged_attention, chunk=chunk, tile=SMALL_TILE)
    assert output[1].isnan().all()
    assert output[[0, 2]].equal(expected[[0, 2]])


# The end of a step


@pytest.mark.parametrize("eos_token_ids", [(), (2,), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_rows_advance_as_in_plain_torch(rows, eos_token_ids):
    generator = torch.Generator().manual_seed(rows)

    def draw(high, low=0):
        return torch.randint(low, high, (72,), generator=generator)

    start = {"token_ids": draw(10), "positions": draw(30, -3).clamp(min=-1), "remaining": draw(5)}
    buffers = [
        allocate_buffers(
            {}, max_rows=72, max_burst=6, eos_token_ids=eos_token_ids, device=torch.device("cpu")
        )
        for _ in range(2)
    ]
    for each in buffers:
        for name, value in start.items():
            getattr(each, name).copy_(value)
        each.best_logits.fill_(-9.0)
    for _ in range(6):
        next_ids, logits = draw(10)[:rows], torch.randn(rows, generator=generator)
        sampling.advance(buffers[0], next_ids, logits)
        decode_finish.advance(buffers[1], next_ids, logits)
        for name in ("token_ids", "positions", "remaining", "outputs", "best_logits", "step"):
            assert getattr(buffers[1], name).equal(getattr(buffers[0], name)), name
        assert buffers[1].best_logits.equal(torch.cat([logits, torch.full((72 - rows,), -9.0)]))
    assert int(buffers[1].step) == 6
    buffers[1].step.zero_()
    decode_finish.advance(buffers[1], next_ids, torch.full((rows,), float("nan")))
    assert buffers[1].best_logits.isnan().sum() == rows
