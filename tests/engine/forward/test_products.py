"""Products with two weights at addresses of their own, as one batched product, on the CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cbexp.engine.forward import products
from tests.engine.kernels.cases import randn

N, K, ROWS = 24, 32, 5


def two_in_one_block(distance, dtype):
    """Two weights in one block of memory, the second's first element `distance` elements after the first's.

    Of whole numbers, whose sums no order of summation rounds.
    """
    block = torch.zeros(distance + N * K, dtype=dtype)
    first, second = (block[start : start + N * K].view(N, K) for start in (0, distance))
    first.copy_(randn(N, K, seed=1).round())
    second.copy_(randn(N, K, seed=2).round())
    return first, second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(
    "distance", [N * K, N * K + 8, 5_000_000], ids=["side by side", "a gap", "far apart"]
)
def test_products_over_two_addresses(distance, is_swapped, dtype):
    first, second = two_in_one_block(distance, dtype)
    first, second = (second, first) if is_swapped else (first, second)
    x = randn(ROWS, K).round().to(dtype)
    for weight, product in zip((first, second), products._multiply_pair(x, first, second), strict=True):
        assert product.double().equal(x.double() @ weight.double().T)


def test_one_weight_twice():
    """As tied projections are."""
    x, weight = randn(ROWS, K), randn(N, K, seed=1)
    for product in products._multiply_pair(x, weight, weight):
        torch.testing.assert_close(product, x @ weight.T)


def test_separate_allocations():
    x, weights = randn(ROWS, K), [randn(N, K, seed=seed) for seed in range(6)]
    for first in weights:
        for second in weights:
            for weight, product in zip(
                (first, second), products._multiply_pair(x, first, second), strict=True
            ):
                torch.testing.assert_close(product, x @ weight.T)


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
    "weights_and_biases",
    [
        ([randn(40, K), randn(N, K), randn(N, K)], []),
        ([randn(N, K), randn(N, K)], [randn(N), randn(N)]),
        ([randn(N, K), randn(N + 1, K)], []),
        # Not 16 bytes apart: such a distance is left to separate products.
        ([randn(N, K), randn(N * K + 1)[1:].view(N, K)], []),
    ],
    ids=["three", "biases", "two shapes", "odd addresses"],
)
def test_products_of_many_rows(weights_and_biases):
    weights, biases = weights_and_biases
    x = randn(ROWS, K, seed=9)
    own = products._project_many_rows(x, weights, biases)
    for index, (weight, product) in enumerate(zip(weights, own, strict=True)):
        expected = x @ weight.T + (biases[index] if biases else 0)
        torch.testing.assert_close(product, expected)
