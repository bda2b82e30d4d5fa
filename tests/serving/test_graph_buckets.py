"""CUDA-graph buckets: the smallest captured size that holds the batch, by a table that agrees with a plain search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InputError
from serving.graph_buckets import GraphBuckets, default_sizes


def test_default_sizes():
    assert default_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert default_sizes(100)[-2:] == (96, 100)
    assert default_sizes(512)[-3:] == (480, 496, 512)
    assert default_sizes(0) == ()


@given(st.sets(st.integers(1, 300), max_size=12), st.integers(-2, 400))
def test_the_bucket_is_the_smallest_captured_size_that_holds(sizes, count):
    fitting = [size for size in sizes if size >= count]
    expected = (min(fitting), "graph") if fitting and count > 0 else (count, "eager")
    assert GraphBuckets(sizes).path(count) == expected


def test_t1_sizes_beyond_the_last_multiple_of_eight_leave_the_captured_path():
    by_eights = GraphBuckets(range(8, 97, 8))
    assert by_eights.path(96) == (96, "graph")
    assert all(by_eights.path(count) == (count, "eager") for count in range(97, 101))
    assert GraphBuckets([*range(8, 97, 8), 100]).path(97) == (100, "graph")


@pytest.mark.parametrize("sizes", [[0, 4], [-1], [10**6]])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(InputError, match=r"latency.capture_sizes: captured sizes must lie between"):
        GraphBuckets(sizes, "latency.capture_sizes")
