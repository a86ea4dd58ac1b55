"""How kernels are cut: by shapes, and by what a device has."""

import pytest

from cbexp.engine.kernels import tiles
from cbexp.engine.kernels.tiles import DeviceLimits, LinearTile

H200 = DeviceLimits(num_multiprocessors=132, max_shared_bytes=227 * 1024)
SMALL = DeviceLimits(num_multiprocessors=30, max_shared_bytes=99 * 1024)


@pytest.mark.parametrize(
    ("out_features", "in_features", "limits", "splits"),
    [
        ((4096, 1024, 1024), 2560, H200, 2),
        ((2560,), 9728, H200, 4),
        ((2560,), 9728, SMALL, 1),
        ((1024,), 128, H200, 2),
        ((32000,), 2560, H200, 1),
        # Each weight has tiles of its own.
        ((10,) * 3, 8192, H200, 8),
    ],
)
def test_products_of_few_columns_are_split(out_features, in_features, limits, splits):
    assert tiles.choose_split_tile(32, out_features, in_features, 2, limits).splits == splits


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 17, 64])
def test_small_cards_get_smaller_tiles(num_rows, itemsize):
    chosen = {
        tiles.choose_split_tile(num_rows, [2560], 9728, itemsize, SMALL): 64,
        tiles.choose_gated_tile(num_rows, itemsize, SMALL): 2 * 32,
        tiles.choose_head_tile(num_rows, itemsize, SMALL): 64,
    }
    for tile, weight_rows in chosen.items():
        tile_rows = weight_rows + tiles.block_rows(num_rows)
        assert tile.num_stages >= 2
        assert tile_rows * tile.block_k * itemsize * tile.num_stages <= SMALL.max_shared_bytes
    # The measured tile of an H200 stays.
    assert tiles.choose_head_tile(num_rows, 2, H200) == LinearTile(64, 128, num_stages=4)


@pytest.mark.parametrize(
    ("num_programs", "num_slots", "expected"),
    [(1, 100, 256), (32, 8704, 512), (256, 1024, 2048), (512, 8704, 4096), (2048, 8704, 16384)],
)
def test_chunks_of_attention(num_programs, num_slots, expected):
    chunk = tiles.choose_attention_chunk(num_programs, num_slots, H200)
    assert chunk == expected
    assert num_programs * -(-num_slots // chunk) <= max(num_programs, 17 * H200.num_multiprocessors)


def test_splits_by_what_the_device_has_left():
    def splits(rows, num_slots=32_768):
        return tiles.choose_num_splits(rows * 8, num_slots, H200)

    assert [splits(rows) for rows in (1, 2, 4, 8, 16, 32, 1024)] == [33, 16, 8, 4, 2, 1, 1]
    assert splits(1, num_slots=1024) == 4
    assert splits(1, num_slots=100) == 1
    assert tiles.choose_num_splits(1, 1_000_000, H200) == tiles.MAX_ATTENTION_SPLITS
