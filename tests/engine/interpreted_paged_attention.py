"""The paged attention kernel in Triton's interpreter; run by `test_paged_attention_interpreted`."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from cbexp.engine.attention_reference import paged_decode_reference
from cbexp.engine.kernels.attention_tiles import AttentionTile
from cbexp.engine.kernels.paged_attention import paged_decode_attention
from tests.engine.paged_attention_cases import build_case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
# Tiles of four tokens, so that few tokens make many iterations.
SMALL_TILE = AttentionTile(num_tokens=4, num_warps=4, num_stages=3)


@pytest.fixture(scope="module", autouse=True)
def _bfloat16_products():
    """The interpreter keeps bfloat16 as bits in uint16, and its dot would multiply those bits as integers."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *rest):
        return create_dot(self, widen(a), widen(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def check(case, *, num_splits=1, tile=SMALL_TILE):
    expected, expected_pages = case.run(paged_decode_reference)

    output, pages = case.run(paged_decode_attention, num_splits=num_splits, tile=tile)

    torch.testing.assert_close(output, expected, **TOLERANCES[case.query.dtype])
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_of_a_key_value_head(group):
    check(build_case([0, 9], heads=2 * group, kv_heads=2))


def test_more_query_heads_than_a_tensor_core_has_rows():
    check(build_case([0, 9], heads=24, kv_heads=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_dtypes(head_dim, dtype):
    tile = AttentionTile(num_tokens=16, num_warps=4, num_stages=3)
    check(build_case([5, 40], head_dim=head_dim, page_size=16, dtype=dtype), tile=tile)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("page_size", [4, 16, 32, 256])
def test_positions_around_the_ends_of_pages(page_size, num_splits):
    """With tiles that are as large as a page, smaller, and larger."""
    positions = [0, 1, page_size - 1, page_size, page_size + 1, -1, 2 * page_size - 1, 2 * page_size]
    tile = AttentionTile(num_tokens=16, num_warps=4, num_stages=3)
    check(build_case(positions, page_size=page_size), num_splits=num_splits, tile=tile)


@pytest.mark.parametrize("page_size", [3, 6, 12, 24])
def test_pages_that_are_no_power_of_two(page_size):
    check(build_case([0, page_size - 1, page_size, 2 * page_size + 1], page_size=page_size))


@pytest.mark.parametrize("num_splits", [1, 2, 5, 8, 33])
def test_splits_more_and_fewer_than_tiles(num_splits):
    """An inactive row, a first token, and rows of fewer tiles than there are splits."""
    check(build_case([-1, 0, 3, 4, 18, 31]), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 6, 16])
def test_sliding_windows(window, num_splits):
    positions = [0, 1, window - 1, window, window + 1, 3 * window + 2, -1]
    check(build_case(positions, window=window), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True, "window": 6}],
    ids=["soft cap", "sinks", "both, and a window"],
)
def test_soft_cap_and_sinks(options, num_splits):
    check(build_case([0, -1, 3, 12, 20], **options), num_splits=num_splits)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(sign, softcap):
    """All of them far from zero, where exponentials overflow or vanish."""
    case = build_case([0, 12], softcap=softcap)
    case.query, case.key = 1e3 * case.query.abs(), sign * 1e3 * case.key.abs()
    case.pages = sign * 1e3 * case.pages.abs()
    check(case)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_that_takes_nothing_or_everything(sink):
    case = build_case([0, 12], sinks=True)
    case.options["sinks"].fill_(sink)
    check(case, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_an_inactive_row_touches_no_page(num_splits):
    case = build_case([8, -1, 12], table_width=4)
    case.block_table[1] = case.block_table[0, 2]
    case.query[1] = case.key[1] = case.value[1] = float("nan")
    check(case, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_nan_stays_in_its_row(num_splits):
    case = build_case([3, 12, 20])
    clean, _ = case.run(paged_decode_attention, num_splits=num_splits, tile=SMALL_TILE)
    case.key[1] = float("nan")

    output, _ = case.run(paged_decode_attention, num_splits=num_splits, tile=SMALL_TILE)

    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2]], clean[[0, 2]])


def test_reads_as_many_rows_as_there_are_queries():
    case = build_case([3, 12, 20])
    case.query, case.key, case.value = case.query[:2], case.key[:2], case.value[:2]
    check(case)


def test_strided_pages():
    """A view of a larger cache: every other head."""
    case = build_case([3, 12])
    wide = torch.full((*case.pages.shape[:2], 4, 16), float("nan"))
    wide[:, :, ::2] = case.pages
    case.pages = wide[:, :, ::2]
    expected, _ = case.run(paged_decode_reference)
    pages = wide.clone()[:, :, ::2]

    tensors = (case.query, case.key, case.value, pages, case.block_table, case.positions, case.page_offset)
    output = paged_decode_attention(*tensors, **case.options, num_splits=1, tile=SMALL_TILE)

    torch.testing.assert_close(output, expected)


def test_refuses_a_last_axis_with_gaps():
    case = build_case([3])
    case.query = torch.cat([case.query, case.query], -1)[..., ::2]
    with pytest.raises(ValueError, match="query must be contiguous in its last axis"):
        case.run(paged_decode_attention, num_splits=1, tile=SMALL_TILE)
