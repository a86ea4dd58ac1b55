"""All kernels but those of attention in Triton's interpreter; run by `test_interpreted`."""

import pytest
import torch
from torch.nn import functional

from cbexp.engine import sampling
from cbexp.engine.forward import reference
from cbexp.engine.kernels import finish, heads, linear, norms
from cbexp.engine.kernels.read_stream import READ_TILES, ReadTile, sum_chunks
from cbexp.engine.kernels.tiles import LinearTile
from tests.engine.kernels.cases import EPS, build_projected_case, check_advance, mostly_slow, randn
from tests.engine.ulps import assert_rounded_alike, unit_in_last_place

pytestmark = pytest.mark.usefixtures("exact_products")

DTYPES = mostly_slow(torch.bfloat16, torch.float32, torch.float16)
ROWS = mostly_slow(17, 1, 3, 16, 70)
# Of no size below is a tile a divisor; 48 columns are fewer than the parts' tiles together.
OUT_FEATURES, IN_FEATURES = 100, 80
TILE = LinearTile(32, 32)


def check_rounded_alike(actual, expected, roundings):
    """Values of half precision are rounded where the model's own code rounds them, `roundings` times."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_rounded_alike(actual, expected, roundings=roundings)


def weight_of(out_features, dtype=torch.float32, in_features=IN_FEATURES, seed=1):
    """Scaled so that products are about one, as behind a norm."""
    return (randn(out_features, in_features, seed=seed) / in_features**0.5).to(dtype)


# Matrix products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", mostly_slow(17, 1, 70, 300))
@pytest.mark.parametrize("sizes", mostly_slow([100, 37, 64], [100], [5, 5, 5], [64, 64, 1]), ids=str)
@pytest.mark.parametrize(
    ("in_features", "splits", "has_bias"),
    mostly_slow((80, 3, True), (48, 2, False), (64, 8, True), (128, 1, False)),
)
def test_products_with_several_weights(in_features, splits, has_bias, sizes, rows, dtype):
    """Each of a size of its own, at an address of its own, in parts that add up and as a whole."""
    x = randn(rows, in_features, dtype=dtype)
    weights = [weight_of(n, dtype, in_features, seed=index) for index, n in enumerate(sizes)]
    biases = [randn(n, dtype=dtype, seed=n) for n in sizes] if has_bias else []
    products = linear.split_linear(x, weights, biases, LinearTile(32, 32, splits=splits))
    whole = linear.split_linear(x, weights, biases, TILE, out_dtype=dtype)
    all_expected = reference.joint_linear(x, weights, biases)
    for parts, part, expected in zip(products, whole, all_expected, strict=True):
        assert parts.shape == (splits, *expected.shape)
        assert parts.dtype == torch.float32
        check_rounded_alike(parts.sum(0).to(dtype), expected, roundings=1)
        check_rounded_alike(part[0], expected, roundings=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up(rows, dtype):
    """By a kernel of their own, and of the vendor's products."""
    x, gate, up = randn(rows, IN_FEATURES, dtype=dtype), *(weight_of(40, dtype, seed=n) for n in (1, 2))
    actual = linear.gate_up_silu(x, gate, up, TILE)
    check_rounded_alike(actual, reference.gated_projection(x, gate, up), roundings=4)
    gate, up = randn(2, rows, 2100, dtype=dtype)
    check_rounded_alike(linear.silu_product(gate, up), functional.silu(gate) * up, roundings=2)


# The best token


def best_tokens(x, weight):
    return finish.best_token(*linear.head_maxima(x, weight, TILE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_head(rows, dtype):
    x, weight = randn(rows, IN_FEATURES, dtype=dtype), weight_of(333, dtype)
    logits = functional.linear(x, weight)
    chosen, values = best_tokens(x, weight)
    assert (chosen.dtype, values.dtype) == (torch.int64, torch.float32)
    of_chosen = logits.gather(1, chosen[:, None])
    check_rounded_alike(values[:, None].to(dtype), of_chosen, roundings=1)
    assert values.to(dtype).float().equal(values)  # the model's own logits are rounded
    if dtype == torch.float32:
        assert chosen.equal(logits.argmax(-1))
    else:
        # Of two logits that are one rounding apart, either may be the larger.
        best = logits.amax(1, keepdim=True)
        assert (of_chosen >= best - 2 * unit_in_last_place(best, dtype)).all()


@pytest.mark.parametrize(
    "ids", mostly_slow((40, 36, 99), ((0, 1),), ((5, 31),), ((31, 32),), ((99, 2),)), ids=str
)
def test_of_equal_logits_the_lowest_id_wins(ids):
    """Where all are negative, zeros beyond the vocabulary do not win."""
    # Whole numbers, whose sums do not depend on their order.
    x, weight = torch.ones(3, 16), -torch.full((100, 16), 2.0)
    weight[list(ids)] = -1.0
    logits = functional.linear(x, weight)
    for chosen, values in (best_tokens(x, weight), finish.largest_logit(logits)):
        assert (chosen.tolist(), values.tolist()) == ([min(ids)] * 3, [-16.0] * 3)


def test_logits_that_are_equal_once_rounded():
    """The model's logits are of its dtype; 257 is 256 in bfloat16."""
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    weight = torch.full((40, 16), 1.0, dtype=torch.bfloat16)
    weight[7] = weight[33] = 16.0
    weight[33, 0] = 17.0
    for chosen, values in (sampling.choose_from_hidden_plainly(x, weight), best_tokens(x, weight)):
        assert (chosen.tolist(), values.tolist()) == ([7], [256.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_columns", mostly_slow(9000, 1, 37, 4096))
def test_largest_logit(num_columns, dtype):
    """Of rows of ordinary values, of negative ones, of NaN, of nothing but minus infinity, and with ties."""
    logits = randn(8, num_columns, dtype=dtype)
    logits[1] = -logits[1].abs() - 1
    logits[2, num_columns // 2], logits[3] = float("nan"), float("-inf")
    if num_columns == 9000:
        # Within a tile, across tiles, and with the last of all.
        for row, ids in enumerate([(3, 5), (4095, 4096), (8999, 0), (8999, 8192)], start=4):
            logits[row, list(ids)] = 50.0
    chosen, values = finish.largest_logit(logits)
    assert ((chosen >= 0) & (chosen < num_columns)).all()
    assert not values[2].isfinite()
    assert chosen[2] == num_columns // 2
    others = [0, 1, 3, 4, 5, 6, 7]
    assert chosen[others].equal(logits[others].argmax(-1))
    assert values.dtype == torch.float32
    assert values[others].equal(logits[others].float().amax(-1))


# The bandwidth


@pytest.mark.parametrize("tile", [READ_TILES[0], ReadTile(16, 3, 4)], ids=str)
def test_the_read_kernel_reads_every_element(tile):
    values, sums = torch.randn(2, tile.chunk_size), torch.full((3,), -1.0)
    sum_chunks(values, sums, tile)
    torch.testing.assert_close(sums[:2], values.sum(dim=1), atol=1e-2, rtol=1e-4)
    assert sums[2] == -1


# Norms, rotation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", mostly_slow(80, 16, 1040))
def test_embedding(hidden, dtype):
    table, weight = randn(37, hidden, dtype=dtype), 1 + randn(hidden, dtype=dtype, seed=1)
    token_ids = torch.tensor([36, 0, 5, 5])
    residual, normed = norms.embed_norm(token_ids, table, weight, EPS)
    expected = reference.embed_norm(token_ids, table, weight, EPS)
    assert residual.equal(expected[0])
    check_rounded_alike(normed, expected[1], roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", mostly_slow(2, 1, 5))
@pytest.mark.parametrize("rows", mostly_slow(17, 1, 70))
def test_residual(rows, splits, dtype):
    hidden = 80
    parts = randn(splits, rows, hidden, dtype=dtype if splits == 1 else torch.float32)
    residual, weight = randn(rows, hidden, dtype=dtype, seed=1), 1 + randn(hidden, dtype=dtype, seed=2)
    summed, normed = norms.add_norm(parts, residual, weight, EPS)
    expected = residual + parts.float().sum(0).to(dtype)
    check_rounded_alike(summed, expected, roundings=2)
    check_rounded_alike(normed, reference.rms_norm(summed, weight, EPS), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", mostly_slow(True, False), ids=["qwen3", "llama"])
@pytest.mark.parametrize("head_dim", mostly_slow(80, 16))
@pytest.mark.parametrize("splits", mostly_slow(2, 1, 3))
def test_heads(splits, head_dim, has_norm, dtype):
    """Fewer heads than a program takes, and more."""
    case = build_projected_case(
        [0, 7, -1, 63], heads=10, kv_heads=2, head_dim=head_dim, splits=splits, norms=has_norm, dtype=dtype
    )
    for index, norm in enumerate(case.norms):
        actual = heads.norm_and_rotate(case.parts[index], case.paged.positions, *case.rotary, norm, eps=EPS)
        # The projection, two of the norm, three of the rotation.
        check_rounded_alike(actual, case.expected_heads()[index], roundings=6)


# A row's NaNs are its own


def test_nan_of_one_row_stays_there():
    others, bad = [0, 1, 3, 4], 2
    x, weight, residual = randn(5, IN_FEATURES), weight_of(OUT_FEATURES), randn(5, OUT_FEATURES, seed=3)

    def run(x):
        first, second = linear.split_linear(x, [weight, weight[:37]], [], LinearTile(32, 32, splits=2))
        normed = norms.add_norm(first, residual, torch.ones(OUT_FEATURES), EPS)
        return [*normed, second.sum(0), linear.gate_up_silu(x, weight, weight, TILE), *best_tokens(x, weight)]

    expected = run(x)
    for value in (float("nan"), float("inf")):
        x[bad] = value
        poisoned = run(x)
        for actual, clean in zip(poisoned, expected, strict=True):
            assert actual[others].equal(clean[others])
        assert 0 <= poisoned[-2][bad] < OUT_FEATURES
        assert not poisoned[-1][bad].isfinite()


# The end of a step


@pytest.mark.parametrize("eos_token_ids", mostly_slow((2, 5, 7), ((),), ((2,),)), ids=str)
@pytest.mark.parametrize("rows", mostly_slow(5, 1, 70))
def test_rows_advance_as_in_plain_torch(rows, eos_token_ids):
    check_advance(finish.advance, rows, eos_token_ids)
