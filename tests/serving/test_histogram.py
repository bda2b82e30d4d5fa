"""The histogram's promises: percentiles within 0.1 % of numpy's, exact ends and mean, and no memory of the order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.histogram import Histogram

PERCENTS = (0, 1, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
durations = st.lists(st.floats(1e-8, 1e6), min_size=1, max_size=200)


def state(histogram: Histogram) -> tuple:
    return (histogram._bins.tobytes(), histogram._total_ns, histogram.count, histogram.min_s, histogram.max_s)


def filled(values, weights=None) -> Histogram:
    histogram = Histogram()
    histogram.add(np.array(values, dtype=float), None if weights is None else np.array(weights, dtype=np.int64))
    return histogram


@given(durations)
@settings(max_examples=60, deadline=None)
def test_every_percentile_is_within_a_thousandth_of_numpys(values):
    got = filled(values).percentiles(PERCENTS)
    np.testing.assert_allclose(got, np.percentile(values, PERCENTS), rtol=1e-3)


@pytest.mark.parametrize("median_s", [1e-4, 0.03, 2.0, 300.0])
def test_many_values_of_real_shapes(median_s):
    values = np.random.default_rng(3).lognormal(np.log(median_s), 1.5, 50_000)
    histogram = filled(values)
    np.testing.assert_allclose(histogram.percentiles(PERCENTS), np.percentile(values, PERCENTS), rtol=1e-3)
    assert histogram.max_s == values.max() and histogram.min_s == values.min()
    assert histogram.mean() == pytest.approx(values.mean(), rel=1e-5)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 1000)), min_size=1, max_size=60), st.randoms())
@settings(max_examples=60, deadline=None)
def test_neither_order_nor_batching_changes_a_bit(pairs, random):
    whole = filled(*zip(*pairs))
    random.shuffle(pairs)
    cut = random.randrange(len(pairs) + 1)
    parts = [filled(*zip(*part)) for part in (pairs[:cut], pairs[cut:]) if part]
    merged = Histogram()
    for part in parts:
        merged.merge(part)
    assert state(merged) == state(whole)
    assert merged.summary() == whole.summary()


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(1, 9)), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_a_weight_is_a_repetition(pairs):
    values, weights = zip(*pairs)
    assert state(filled(values, weights)) == state(filled(np.repeat(values, weights)))


def test_the_mean_is_the_exact_sum_of_nanoseconds_even_beyond_64_bits():
    histogram = filled([5e8, 1e-9], [2**40, 3])
    assert histogram._total_ns == 5 * 10**17 * 2**40 + 3
    assert filled([0.1, 0.2]).mean() == 0.15


def test_zeros_and_nothing():
    assert filled([0.0, 0.0, 4.0]).percentile(50) == 0.0
    assert Histogram().summary() == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    assert filled([], []).count == 0


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_time_that_runs_backwards_is_refused(bad):
    with pytest.raises(ValueError, match="duration"):
        filled([1.0, bad])
