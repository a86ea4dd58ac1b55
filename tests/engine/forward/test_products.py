"""Products with two weights at addresses of their own, as one batched product, on the CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cbexp.engine.forward import products
from tests.engine.kernels.cases import randn

N, K = 24, 32
# Of whole numbers, whose sums no order of summation rounds.
X = randn(5, K, seed=9).round()


def weights_in_one_block(distance, dtype=torch.float32):
    """Two weights, the second's first element `distance` elements after the first's."""
    block = randn(distance + N * K).round().to(dtype)
    return [block[start : start + N * K].view(N, K) for start in (0, distance)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distance", [N * K, N * K + 8, 5_000_000, 0], ids=str)
def test_products_over_two_addresses(distance, dtype):
    """Side by side, with a gap, far apart; the same one twice, as tied projections are. In both orders."""
    x, weights = X.to(dtype), weights_in_one_block(distance, dtype)
    for pair in (weights, weights[::-1]):
        for weight, product in zip(pair, products._multiply_pair(x, *pair), strict=True):
            assert product.double().equal(x.double() @ weight.double().T)


def test_values_written_later_are_read_and_nothing_is_kept_alive():
    first, second = sorted((randn(N, K), randn(N, K, seed=1)), key=torch.Tensor.data_ptr)
    both = products._as_one_tensor(first, second)
    second.mul_(2)
    assert both[0].equal(first)
    assert both[1].equal(second)
    storages = [StorageWeakRef(weight.untyped_storage()) for weight in (first, second)]
    del first, second
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize(
    "weights",
    [
        [randn(40, K), randn(N, K), randn(N, K)],
        [randn(N, K), randn(N + 1, K)],
        # Not 16 bytes apart: such a distance is left to separate products.
        weights_in_one_block(N * K + 1),
    ],
    ids=["three", "two shapes", "odd addresses"],
)
def test_products_of_many_rows(weights):
    for biases in ([], [randn(len(weight)) for weight in weights]):
        own = products._project_many_rows(X, weights, biases)
        for index, (weight, product) in enumerate(zip(weights, own, strict=True)):
            torch.testing.assert_close(product, X @ weight.T + (biases[index] if biases else 0))
