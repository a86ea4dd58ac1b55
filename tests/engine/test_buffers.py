"""The static buffers of decode steps: how they are filled, what rows they have, how rows advance through them."""

import pytest
import torch

from cbexp.engine.buffers import DecodeRow, PagePool, RowUpload, allocate_buffers
from cbexp.engine.sampling import advance, choose

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def buffers():
    def pool(layers, trash_page, width, window):
        return PagePool(layers, torch.zeros(40, 8, 2, 4), 2 * len(layers), trash_page, width, window)

    pools = {FULL: pool((1, 3), 8, 5, 0), SLIDING: pool((0, 2, 4), 6, 2, 12)}
    sizes = {"max_rows": 6, "max_burst": 4, "eos_token_ids": (7, 9)}
    return allocate_buffers(pools, **sizes, device=torch.device("cpu"))


def test_new_buffers_are_inactive_and_on_trash(buffers):
    assert buffers.positions.tolist() == [-1] * 6
    assert buffers.block_tables[FULL].tolist() == [[8] * 5] * 6
    assert buffers.block_tables[SLIDING].tolist() == [[6] * 2] * 6


def test_layers_know_their_pool_and_rank(buffers):
    assert [layer.window for layer in buffers.layers] == [12, 0, 12, 0, 12]
    assert [int(layer.page_offset) for layer in buffers.layers] == [0, 0, 2, 2, 4]
    for layer, name in zip(buffers.layers, [SLIDING, FULL, SLIDING, FULL, SLIDING], strict=True):
        assert layer.block_table is buffers.block_tables[name]
        assert layer.pages is buffers.pools[name].pages


def test_rows_advance_end_and_stay_ended(buffers):
    buffers.token_ids.copy_(torch.tensor([1, 2, 3, 4, 5, 6]))
    buffers.positions.copy_(torch.tensor([10, 20, -1, 30, 40, 50]))
    buffers.remaining.copy_(torch.tensor([3, 1, 5, 3, 2, 9]))
    buffers.best_logits.fill_(-8.0)
    addresses = [tensor.data_ptr() for tensor in buffers.state()]

    # The last row of six is not in the batch.
    advance(buffers, torch.tensor([11, 12, 13, 9, 15]), torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5]))
    # The second row made its last token, the fourth an EOS, the third was not there.
    assert buffers.positions.tolist() == [11, -1, -1, -1, 41, 50]
    assert buffers.token_ids.tolist() == [11, 2, 3, 4, 15, 6]
    assert buffers.remaining.tolist() == [2, 0, 5, 2, 1, 9]
    assert buffers.best_logits.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, -8.0]
    logits = torch.tensor([5.5, float("nan"), 7.5, 8.5, 9.5])
    advance(buffers, torch.tensor([21, 22, 23, 24, 25]), logits)
    assert buffers.positions.tolist() == [12, -1, -1, -1, -1, 50]
    assert buffers.remaining.tolist() == [1, 0, 5, 2, 0, 9]
    made = [[11, 12, -1, 9, 15, -1], [21, -1, -1, -1, 25, -1]]
    assert buffers.outputs.tolist() == [*made, [-1] * 6, [-1] * 6]
    assert int(buffers.step) == 2
    assert buffers.best_logits[[0, 4, 5]].tolist() == [5.5, 9.5, -8.0]
    assert [tensor.data_ptr() for tensor in buffers.state()] == addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_best_logit_is_the_first_of_the_largest(dtype):
    """In float32, as in `generate`."""
    nan = float("nan")
    logits = torch.tensor([[1, 3, 3 + 1e-12, 2], [-5, -4, -6, -4], [2, nan, 4, 1]], dtype=dtype)
    next_ids, best_logits = choose(logits)
    assert next_ids.tolist() == [1, 1, 1]
    assert best_logits.dtype == torch.float32
    assert best_logits[:2].tolist() == [3, -4]
    assert best_logits[2].isnan()


def test_an_upload_replaces_all_rows(buffers):
    """Tables hold first pages of blocks: four pages a block of the full pool, six of the sliding one."""
    upload = RowUpload(buffers)
    rows = [
        DecodeRow(5, 17, 3, {FULL: [4, 9, 6], SLIDING: [7]}),
        DecodeRow(6, 0, 1, {FULL: [5], SLIDING: [8, 3]}),
    ]
    buffers.step.fill_(3)
    upload.upload([*rows, *rows])
    upload.upload(rows)
    assert buffers.token_ids[:2].tolist() == [5, 6]
    assert buffers.positions.tolist() == [17, 0, -1, -1, -1, -1]
    assert buffers.remaining[:2].tolist() == [3, 1]
    assert buffers.block_tables[FULL].tolist() == [[16, 36, 24, 8, 8], [20, 8, 8, 8, 8], *[[8] * 5] * 4]
    assert buffers.block_tables[SLIDING].tolist() == [[42, 6], [48, 18], *[[6] * 2] * 4]
    assert int(buffers.step) == 0
