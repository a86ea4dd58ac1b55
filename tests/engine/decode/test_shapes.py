"""How long bursts are, and how many rows they compute."""

import pytest

from cbexp.engine.decode.shapes import (
    ADMISSION_BURST,
    MIN_BURST,
    TAIL_BURST,
    TAIL_BURST_ON_CPU,
    build_batch_shapes,
    choose_burst_length,
)


def length(remaining, *, has_eos=False, waits=False, max_burst=1000, policy="buckets", **options):
    shapes = build_batch_shapes(policy, None, 8)
    options |= {"has_eos": has_eos, "is_queue_empty": not waits, "max_burst": max_burst}
    return choose_burst_length(remaining, shapes, **options)


def test_never_longer_than_the_longest_row_or_the_buffers():
    for waits in (False, True):
        assert length([500] * 8, waits=waits, max_burst=20) == 20
        assert length([3, 5], waits=waits, has_eos=True) == 5


def test_the_tail_stops_where_a_smaller_bucket_will_do():
    assert length([300] * 5) == 300
    # Six rows compute eight; once two have ended four do.
    assert length([40, 90, 50, 70, 80, 60]) == 50
    # Five rows: one is enough. With the batch always full, nothing is.
    assert length([40, 90, 50, 70, 80]) == 40
    assert length([40, 90, 50, 70, 80], policy="full") == 90
    assert length([40, 90], policy="natural") == 40
    # That is not worth a tiny burst.
    assert length([1, 2, 3, 400, 400]) == MIN_BURST


def test_rows_that_may_end_are_looked_after():
    assert length([300] * 5, has_eos=True) == TAIL_BURST
    assert length([300] * 5, has_eos=True, waits=True) == ADMISSION_BURST
    assert length([300] * 5, has_eos=True, is_on_cpu=True) == TAIL_BURST_ON_CPU


def test_while_requests_wait_the_first_limit_frees_the_first_row():
    assert length([200, 300], waits=True) == 200
    assert length([2, 300], waits=True) == ADMISSION_BURST


@pytest.mark.parametrize(
    ("policy", "buckets", "max_requests", "sizes", "of_three"),
    [
        ("buckets", None, 5, (1, 2, 4, 5), 4),
        ("buckets", None, 1, (1,), None),
        ("buckets", (3, 6, 12, 24), 7, (3, 6, 12), 3),
        ("buckets", (3, 6), 100, (3, 6), 3),
        ("full", None, 5, (5,), 5),
        ("natural", None, 5, (1, 2, 3, 4, 5), 3),
    ],
)
def test_sizes_of_batches(policy, buckets, max_requests, sizes, of_three):
    shapes = build_batch_shapes(policy, buckets, max_requests)
    assert shapes.sizes == sizes
    assert shapes.max_rows == sizes[-1]
    if of_three is not None:
        assert shapes.size_for(3) == of_three
