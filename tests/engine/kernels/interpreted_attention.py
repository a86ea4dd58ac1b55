"""The two kernels of paged decode attention in Triton's interpreter; run by `test_interpreted`."""

from dataclasses import replace

import pytest
import torch

from cbexp.engine.attention import paged_decode_reference
from cbexp.engine.kernels.paged_attention import paged_decode_attention
from cbexp.engine.kernels.rotated_attention import rotated_paged_attention
from cbexp.engine.kernels.tiles import AttentionTile
from tests.engine.kernels.cases import build_paged_case, build_rotated_case, is_same, mostly_slow

DTYPES = mostly_slow(torch.bfloat16, torch.float32, torch.float16)
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
# Tiles of few tokens, so that few tokens make many iterations.
SMALL_TILE = AttentionTile(num_tokens=4, num_warps=4, num_stages=3)
TILE = AttentionTile(num_tokens=16, num_warps=4, num_stages=2)
SPLITS = mostly_slow(3, 1)


def check(case, *, num_splits=1, tile=SMALL_TILE):
    expected, expected_pages = case.run(paged_decode_reference)
    output, pages = case.run(paged_decode_attention, num_splits=num_splits, tile=tile)
    torch.testing.assert_close(output, expected, **TOLERANCES[output.dtype])
    assert is_same(pages, expected_pages).all()


# Heads that are ready


@pytest.mark.parametrize("group", mostly_slow(3, *(n for n in range(1, 9) if n != 3), 24))
def test_query_heads_of_a_key_value_head(group):
    """A tensor core has 16 rows for them, or more."""
    check(build_paged_case([0, 9], heads=2 * group, kv_heads=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", mostly_slow(80, 64, 96, 128, 256))
def test_head_sizes_and_dtypes(head_dim, dtype):
    check(build_paged_case([5, 40], head_dim=head_dim, page_size=16, dtype=dtype), tile=TILE)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("page_size", mostly_slow(16, 4, 32, 256))
def test_positions_around_the_ends_of_pages(page_size, num_splits):
    """With tiles that are as large as a page, smaller, and larger."""
    positions = [0, 1, page_size - 1, page_size, page_size + 1, -1, 2 * page_size - 1, 2 * page_size]
    check(build_paged_case(positions, page_size=page_size), num_splits=num_splits, tile=TILE)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [3, 6, 12, 24])
def test_pages_that_are_no_power_of_two(page_size):
    check(build_paged_case([0, page_size - 1, page_size, 2 * page_size + 1], page_size=page_size))


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 2, 5, 8, 33])
def test_splits_more_and_fewer_than_tiles(num_splits):
    """An inactive row, a first token, and rows of fewer tiles than there are splits."""
    check(build_paged_case([-1, 0, 3, 4, 18, 31]), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("window", mostly_slow(6, 1, 4, 16))
def test_sliding_windows(window, num_splits):
    positions = [0, 1, window - 1, window, window + 1, 3 * window + 2, -1]
    check(build_paged_case(positions, window=window), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize(
    "options",
    mostly_slow({"softcap": 2.0, "sinks": True, "window": 6}, {"softcap": 2.0}, {"sinks": True}),
    ids=str,
)
def test_soft_cap_and_sinks(options, num_splits):
    check(build_paged_case([0, -1, 3, 12, 20], **options), num_splits=num_splits)


@pytest.mark.parametrize("softcap", mostly_slow(30.0, 0.0))
@pytest.mark.parametrize("sign", mostly_slow(1, -1))
def test_large_logits(sign, softcap):
    """All of them far from zero, where exponentials overflow or vanish."""
    case = build_paged_case([0, 12], softcap=softcap)
    case.query, case.key = 1e3 * case.query.abs(), sign * 1e3 * case.key.abs()
    case.pages = sign * 1e3 * case.pages.abs()
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_that_takes_nothing_or_everything(sink):
    case = build_paged_case([0, 12], sinks=True)
    case.options["sinks"].fill_(sink)
    check(case, num_splits=2)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_an_inactive_row_touches_no_page(num_splits):
    case = build_paged_case([8, -1, 12], table_width=4)
    case.block_table[1] = case.block_table[0, 2]
    case.query[1] = case.key[1] = case.value[1] = float("nan")
    check(case, num_splits=num_splits)


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_nan_stays_in_its_row(num_splits):
    case = build_paged_case([3, 12, 20])
    clean, _ = case.run(paged_decode_attention, num_splits=num_splits, tile=SMALL_TILE)
    case.key[1] = float("nan")
    output, _ = case.run(paged_decode_attention, num_splits=num_splits, tile=SMALL_TILE)
    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2]], clean[[0, 2]])


def test_reads_as_many_rows_as_there_are_queries():
    case = build_paged_case([3, 12, 20])
    case.query, case.key, case.value = case.query[:2], case.key[:2], case.value[:2]
    check(case)


@pytest.mark.slow
def test_strided_pages():
    """A view of a larger cache: every other head."""
    case = build_paged_case([3, 12])
    wide = torch.full((*case.pages.shape[:2], 4, 16), float("nan"))
    wide[:, :, ::2] = case.pages
    case.pages = wide[:, :, ::2]
    expected, _ = case.run(paged_decode_reference)
    tensors = case.tensors()
    tensors[3] = wide.clone()[:, :, ::2]
    output = paged_decode_attention(*tensors, **case.options, num_splits=1, tile=SMALL_TILE)
    torch.testing.assert_close(output, expected)


def test_refuses_a_last_axis_with_gaps():
    case = build_paged_case([3])
    case.query = torch.cat([case.query, case.query], -1)[..., ::2]
    with pytest.raises(ValueError, match="query must be contiguous in its last axis"):
        case.run(paged_decode_attention, num_splits=1, tile=SMALL_TILE)


# Heads that the kernel makes of their projections

POSITIONS = [0, 3, 4, -1, 15, 16, 17, 40]
# A chunk for all that a row can store, chunks of which the last may be full or hold nothing but the new token.
CHUNKS = mostly_slow(16, 1024)


def check_rotated(case, chunk=1024, **tile):
    expected, expected_pages = case.expected()
    output, pages = case.run(rotated_paged_attention, chunk=chunk, tile=replace(TILE, **tile))
    tolerance = TOLERANCES[output.dtype]
    torch.testing.assert_close(output, expected, **tolerance)
    # Nothing but the new tokens has been written; those are rounded as the heads are.
    before = case.paged.pages
    assert is_same(pages, before).all(-1).equal(is_same(expected_pages, before).all(-1))
    torch.testing.assert_close(pages, expected_pages, **tolerance, equal_nan=True)
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", mostly_slow(True, False), ids=["qwen3", "llama"])
@pytest.mark.parametrize(
    ("page_size", "chunk"), mostly_slow((4, 32), (4, 1024), (16, 1024), (32, 1024), (16, 16))
)
def test_attention_of_projections(chunk, page_size, norms, dtype):
    case = build_rotated_case(POSITIONS, page_size=page_size, norms=norms, dtype=dtype)
    output = check_rotated(case, chunk)
    assert not output[POSITIONS.index(-1)].any()


@pytest.mark.parametrize(
    ("window", "page_size"),
    mostly_slow((6, 4), (1, 4), (6, 16), (16, 4), (16, 16), (24, 16), (24, 32), (100, 32)),
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_attention_of_projections_in_a_window(chunk, window, page_size):
    check_rotated(build_rotated_case(POSITIONS, window=window, page_size=page_size), chunk)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (2, 2, 16), (7, 1, 32), (24, 1, 16)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_attention_of_groups(chunk, heads, kv_heads, head_dim):
    case = build_rotated_case([0, 20, 33], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check_rotated(case, chunk)


@pytest.mark.parametrize(("rows", "splits"), mostly_slow((3, 4), (1, 1), (16, 2), (17, 1), (70, 2)))
def test_attention_of_many_rows(rows, splits):
    positions = [(5 * row) % 23 - 1 for row in range(rows)]
    positions[0] = 3
    check_rotated(build_rotated_case(positions, splits=splits, heads=2, kv_heads=1), num_tokens=32)
    check_rotated(build_rotated_case(positions, splits=splits, heads=2, kv_heads=1), chunk=16)


def test_no_active_row_leaves_every_page():
    case = build_rotated_case([5, 9])
    case.projected.positions.fill_(-1)
    output, pages = case.run(rotated_paged_attention, tile=TILE)
    assert not output.any()
    assert torch.equal(pages.view(torch.int32), case.paged.pages.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "chunk"), [(24, 16), (0, 1024), (6, 1024), (0, 16)])
def test_a_nan_stays_in_its_row_of_projections(window, chunk):
    case = build_rotated_case([29, 35, 12], window=window)
    expected, _ = case.run(rotated_paged_attention, chunk=chunk, tile=TILE)
    for parts in case.projected.parts:
        parts[:, 1] = float("nan")
    entries = case.paged.block_table[1].long()
    for page in (*entries + 2, *entries + 3):
        case.paged.pages[page] = float("nan")
    output, _ = case.run(rotated_paged_attention, chunk=chunk, tile=TILE)
    assert output[1].isnan().all()
    assert output[[0, 2]].equal(expected[[0, 2]])
