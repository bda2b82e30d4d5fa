"""A histogram of durations in constant memory whose every percentile is within 0.1 % and whose mean is exact.

A duration's bin is the top of its IEEE-754 pattern: exponent and the first nine bits of the mantissa, so an octave has 512
equal bins and the middle of a bin is at most 1/1024 (0.098 %) from anything in it. No logarithm is taken: the bin of a value
is the same on every machine. Counts, and the sum in whole nanoseconds, are integers: neither the order of additions nor the
way they were batched changes a bit of any result.
"""

from __future__ import annotations

import numpy as np

from serving.errors import InputError

_SHIFT = 52 - 9
_SMALLEST_S = 2.0**-30  # just under a nanosecond; anything shorter counts as zero
LONGEST_S = 2.0**33  # 272 years
_FIRST = int(np.float64(_SMALLEST_S).view(np.int64)) >> _SHIFT
_BINS = (int(np.float64(LONGEST_S).view(np.int64)) >> _SHIFT) - _FIRST + 1  # one of them, the first, holds the zeros
_EXACT_INT64 = 2**62


class Histogram:
    """Durations in seconds, from 1 ns to 272 years, each with an integer weight (how often it occurred)."""

    __slots__ = ("_bins", "_total_ns", "count", "max_s", "min_s")

    def __init__(self) -> None:
        self._bins = np.zeros(_BINS, dtype=np.int64)
        self._total_ns = 0
        self.count = 0
        self.max_s = -np.inf
        self.min_s = np.inf

    def add(self, values_s: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add every duration of ``values_s`` (float64, shape (n,)), the i-th of them ``weights[i]`` times (integers >= 0).

        Raises ValueError for a duration that is negative or not a number: time ran backwards somewhere; InputError for one above 272
        years: a scenario asked for it.
        """
        if weights is not None and not weights.all():
            values_s, weights = values_s[weights > 0], weights[weights > 0]
        if values_s.size == 0:
            return
        low, high = float(values_s.min()), float(values_s.max())
        if low >= 0.0 and high >= LONGEST_S:
            raise InputError("scenario", f"a duration of {high:.3g} s is longer than the 272 years that a run may last", "a rate or a time is out of proportion")
        if not low >= 0.0:
            raise ValueError(f"a duration must lie in [0, {LONGEST_S:g}) s, got {low!r} to {high!r}")
        index = np.maximum((np.ascontiguousarray(values_s, dtype=np.float64).view(np.int64) >> _SHIFT) - (_FIRST - 1), 0)
        offset = int(index.min())
        added = np.bincount(index - offset, weights)  # float64 with weights: exact below 2**53
        self._bins[offset : offset + added.size] += added.astype(np.int64)
        self.count += values_s.size if weights is None else int(weights.sum())
        self._total_ns += _sum_ns(values_s, weights, high)
        self.min_s = min(self.min_s, low)
        self.max_s = max(self.max_s, high)

    def merge(self, other: Histogram) -> None:
        """Add all that ``other`` holds; the result is that of adding both streams to one histogram, bit for bit."""
        self._bins += other._bins
        self._total_ns += other._total_ns
        self.count += other.count
        self.min_s = min(self.min_s, other.min_s)
        self.max_s = max(self.max_s, other.max_s)

    def mean(self) -> float | None:
        """Return the mean in seconds, each duration rounded to a nanosecond first; None when empty."""
        return self._total_ns / (self.count * 1_000_000_000) if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the percentile in seconds, interpolated between neighbours as ``numpy.percentile`` does; None when empty."""
        return self.percentiles((percent,))[0]

    def percentiles(self, percents: tuple[float, ...]) -> list[float | None]:
        """Return several percentiles (0 to 100) in seconds from one pass over the bins."""
        if not self.count:
            return [None] * len(percents)
        cumulative = np.cumsum(self._bins)
        result: list[float | None] = []
        for percent in percents:
            rank = percent / 100 * (self.count - 1)
            below = int(rank)
            low = self._order_statistic(cumulative, below)
            high = self._order_statistic(cumulative, min(below + 1, self.count - 1))
            result.append(low + (high - low) * (rank - below))
        return result

    def _order_statistic(self, cumulative: np.ndarray, rank: int) -> float:
        """Return the ``rank``-th smallest duration (from 0): exact at both ends, the middle of its bin between."""
        if rank <= 0:
            return self.min_s
        if rank >= self.count - 1:
            return self.max_s
        index = int(np.searchsorted(cumulative, rank, side="right"))
        if index == 0:
            return self.min_s
        edges = np.array([index + _FIRST - 1, index + _FIRST], dtype=np.int64) << _SHIFT
        return min(max(float(edges.view(np.float64).mean()), self.min_s), self.max_s)

    def summary(self) -> dict[str, float | None]:
        """Return mean, p50, p90, p95, p99 and max in seconds (None each when empty)."""
        p50, p90, p95, p99 = self.percentiles((50, 90, 95, 99))
        return {"mean": self.mean(), "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": self.max_s if self.count else None}


def _sum_ns(values_s: np.ndarray, weights: np.ndarray | None, largest_s: float) -> int:
    """Return the exact weighted sum of the durations, each in whole nanoseconds."""
    nanoseconds = np.rint(values_s * 1e9).astype(np.int64)
    total_weight = nanoseconds.size if weights is None else int(weights.sum())
    if (largest_s * 1e9 + 1) * total_weight < _EXACT_INT64:
        return int(nanoseconds.sum() if weights is None else (nanoseconds * weights).sum())
    factors = [1] * nanoseconds.size if weights is None else weights.tolist()
    return sum(ns * factor for ns, factor in zip(nanoseconds.tolist(), factors))
