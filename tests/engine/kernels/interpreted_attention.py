"""The two kernels of paged decode attention in Triton's interpreter; run by `test_interpreted`."""

import pytest
import torch

from cbexp.engine.attention import paged_decode_reference
from cbexp.engine.kernels.paged_attention import paged_decode_attention
from cbexp.engine.kernels.rotated_attention import rotated_paged_attention
from cbexp.engine.kernels.tiles import AttentionTile
from tests.engine.kernels.cases import build_paged_case, build_projected_case, is_same, mostly_slow

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
# Tiles of few tokens make many iterations; a page holds several, one, or less than one.
TILES = [AttentionTile(num_tokens=n, num_warps=4, num_stages=2) for n in (4, 16, 32)]
SPLITS = mostly_slow(3, 1)
# An inactive row, a first token, rows of fewer tiles than there are splits.
ROWS = [-1, 0, 3, 4, 18, 31]


def check(case, num_splits=1):
    expected, expected_pages = case.run(paged_decode_reference)
    for tile in TILES[:2]:
        output, pages = case.run(paged_decode_attention, num_splits=num_splits, tile=tile)
        torch.testing.assert_close(output, expected, **TOLERANCES[output.dtype])
        assert is_same(pages, expected_pages).all()


def page_ends(page_size):
    return [0, 1, page_size - 1, page_size, page_size + 1, -1, 2 * page_size - 1, 2 * page_size]


def window_ends(window):
    return [0, 1, window - 1, window, window + 1, 3 * window + 2, -1]


# Heads that are ready


@pytest.mark.parametrize(
    ("positions", "num_splits", "options"),
    mostly_slow(
        (page_ends(4), 3, {"heads": 6}),
        (window_ends(6), 3, {"softcap": 2.0, "sinks": True, "window": 6}),
        ([5, 40], 1, {"page_size": 16, "dtype": torch.bfloat16, "head_dim": 80}),
        *(([5, 40], 1, {"page_size": 16, "dtype": dtype, "head_dim": 80}) for dtype in DTYPES),
        *(([5, 40], 1, {"page_size": 16, "head_dim": head_dim}) for head_dim in (64, 96, 128, 256)),
        *(([0, 9], 1, {"heads": 2 * group}) for group in (1, 2, 4, 5, 7, 8, 24)),
        *(
            (page_ends(size), n, {"page_size": size})
            for size in (3, 4, 6, 12, 16, 24, 32, 256)
            for n in (1, 3)
        ),
        *((window_ends(window), n, {"window": window}) for window in (1, 4, 6, 16) for n in (1, 3)),
        *((ROWS, num_splits, {}) for num_splits in (2, 5, 8, 33)),
        *((ROWS, 1, options) for options in ({"softcap": 2.0}, {"sinks": True})),
        num_fast=3,
    ),
    ids=str,
)
def test_ready_heads(positions, num_splits, options):
    """Groups of query heads, sizes of heads and pages, splits, windows, soft caps and sinks."""
    check(build_paged_case(positions, **options), num_splits)


@pytest.mark.parametrize(
    ("factor", "softcap", "sink"),
    mostly_slow((1e3, 30.0, None), (1e3, 0.0, None), (-1e3, 0.0, None), (1.0, 0.0, 1e4), (1.0, 0.0, -1e4)),
)
def test_large_logits(factor, softcap, sink):
    """All far from zero, where exponentials overflow or vanish; a sink that takes everything or nothing."""
    case = build_paged_case([0, 12], softcap=softcap)
    case.query, case.key = 1e3 * case.query.abs(), factor * case.key.abs()
    case.pages = factor * case.pages.abs()
    case.options["sinks"] = None if sink is None else torch.full((4,), sink)
    check(case, num_splits=2)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_an_inactive_row_touches_no_page(num_splits):
    """Nor does a row that has no query, of the largest batch's."""
    case = build_paged_case([8, -1, 12, 20], table_width=6)
    case.block_table[1] = case.block_table[0, 2]
    case.query[1] = case.key[1] = case.value[1] = float("nan")
    case.query, case.key, case.value = case.query[:3], case.key[:3], case.value[:3]
    check(case, num_splits=num_splits)


# Heads that the kernel makes of their projections

POSITIONS = [0, 3, 4, -1, 15, 16, 17, 40]
ONE_HEAD = {"heads": 2, "kv_heads": 1}


def many_rows(num_rows):
    return [3, *((5 * row) % 23 - 1 for row in range(1, num_rows))]


@pytest.mark.parametrize(
    ("positions", "chunk", "options"),
    mostly_slow(
        (POSITIONS, 32, {"page_size": 4, "dtype": torch.bfloat16}),
        (POSITIONS, 16, {"window": 6}),
        (many_rows(3), 16, {"splits": 4, **ONE_HEAD}),
        # A chunk for all that a row can store, chunks of which the last may be full or hold the new token alone.
        *(
            (POSITIONS, chunk, {"page_size": page_size, "norms": norms, "dtype": dtype})
            for page_size, chunk in ((4, 32), (4, 1024), (16, 1024), (32, 1024), (16, 16))
            for norms in (True, False)
            for dtype in DTYPES
        ),
        *(
            (positions, chunk, options)
            for positions, options in (
                *((POSITIONS, {"window": n, "page_size": 4}) for n in (1, 6, 16)),
                *((POSITIONS, {"window": n, "page_size": 16}) for n in (6, 16, 24)),
                *((POSITIONS, {"window": n, "page_size": 32}) for n in (24, 100)),
                ([0, 20, 33], {"heads": 6, "kv_heads": 2, "head_dim": 64}),
                ([0, 20, 33], {"heads": 7, "kv_heads": 1, "head_dim": 32}),
                ([0, 20, 33], {"heads": 24, "kv_heads": 1}),
                *((many_rows(n), {"splits": m, **ONE_HEAD}) for n, m in ((1, 1), (3, 4), (17, 1), (70, 2))),
            )
            for chunk in (16, 1024)
        ),
        num_fast=3,
    ),
    ids=str,
)
def test_projections(positions, chunk, options):
    """Norms, pages and chunks, windows, groups of query heads, parts of a product, many rows."""
    case = build_projected_case(positions, **options)
    expected, expected_pages = case.expected()
    before, tolerance = case.paged.pages, TOLERANCES[expected.dtype]
    for tile in TILES[1:]:
        output, pages = case.run(rotated_paged_attention, chunk=chunk, tile=tile)
        torch.testing.assert_close(output, expected, **tolerance)
        # Nothing but the new tokens has been written; those are rounded as the heads are.
        assert is_same(pages, before).all(-1).equal(is_same(expected_pages, before).all(-1))
        torch.testing.assert_close(pages, expected_pages, **tolerance, equal_nan=True)
        assert not output[torch.tensor(positions) < 0].any()


def test_no_active_row_leaves_every_page():
    case = build_projected_case([5, 9])
    case.paged.positions.fill_(-1)
    output, pages = case.run(rotated_paged_attention, tile=TILES[1])
    assert not output.any()
    assert torch.equal(pages.view(torch.int32), case.paged.pages.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "chunk"), [(24, 16), (0, 1024), (6, 1024), (0, 16)])
def test_a_nan_stays_in_its_row_of_projections(window, chunk):
    case = build_projected_case([29, 35, 12], window=window)
    expected, _ = case.run(rotated_paged_attention, chunk=chunk, tile=TILES[1])
    for parts in case.parts:
        parts[:, 1] = float("nan")
    entries = case.paged.block_table[1].long()
    for page in (*entries + 2, *entries + 3):
        case.paged.pages[page] = float("nan")
    output, _ = case.run(rotated_paged_attention, chunk=chunk, tile=TILES[1])
    assert output[1].isnan().all()
    assert output[[0, 2]].equal(expected[[0, 2]])
