"""Intervals and decisions: how sure a difference is, how many replications would settle it, and when to call it a regression.

Replications (independent runs) are the unit of evidence wherever a decision hangs on it: latencies *within* one run are
correlated through the queue, so intervals that treat them as independent are too narrow (`series_interval` is for those).

Sources: B. Efron, JASA 82 (1987) for BCa; S. Holm, Scand. J. Statist. 6 (1979); Y. Benjamini and Y. Hochberg, J. R. Statist.
Soc. B 57 (1995); H. Kuensch, Ann. Statist. 17 (1989) for the moving-block bootstrap; R. Fisher, The Design of Experiments
(1935) for sign flips. Heavy parts of scipy load inside the functions that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Statistic = Callable[..., np.ndarray]  # statistic(values, axis=-1) -> values reduced along that axis
_CHUNK_VALUES = 4_000_000  # resampled values held at once: 32 MB
_EXACT_FLIPS = 12  # up to 2^12 sign patterns are enumerated; beyond, they are drawn


class Interval(NamedTuple):
    """A point estimate and the interval that covers the truth with probability ``level``."""

    estimate: float
    low: float
    high: float
    level: float = 0.95

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies inside, the ends included."""
        return self.low <= value <= self.high


def _resampled(values: np.ndarray, statistic: Statistic, indices: Callable[[int], np.ndarray], resamples: int) -> np.ndarray:
    """Return ``statistic`` of each resample; ``values`` is [..., n] and all its leading rows share the drawn indices."""
    rows = max(1, _CHUNK_VALUES // max(1, values.size))
    parts = []
    for start in range(0, resamples, rows):
        drawn = indices(min(rows, resamples - start))
        parts.append(np.asarray(statistic(values[..., drawn], axis=-1)))
    return np.concatenate(parts, axis=-1)


def _bca_levels(values: np.ndarray, statistic: Statistic, replicates: np.ndarray, estimate: float, level: float) -> tuple[float, float]:
    """Return the two quantile levels that BCa reads from the replicates: bias from their median, acceleration from a jackknife."""
    from scipy.special import ndtr, ndtri

    below = (np.count_nonzero(replicates < estimate) + np.count_nonzero(replicates <= estimate)) / (2 * len(replicates))
    edge = 0.5 / len(replicates)
    bias = float(ndtri(min(max(below, edge), 1 - edge)))
    n = len(values)
    kept = np.arange(n - 1)[None, :] + (np.arange(n - 1)[None, :] >= np.arange(n)[:, None])
    jackknife = np.asarray(statistic(values[kept], axis=-1))
    spread = jackknife.mean() - jackknife
    cube, square = float((spread**3).sum()), float((spread**2).sum())
    acceleration = cube / (6 * square**1.5) if square > 0 else 0.0
    tails = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = bias + float(ndtri(tail))
        tails.append(float(ndtr(bias + z / (1 - acceleration * z))))
    return tails[0], tails[1]


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    statistic: Statistic = np.mean,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = 2000,
    method: str = "bca",
) -> Interval:
    """Interval of a statistic of independent values, by resampling them.

    ``method`` is "bca" (corrects bias and skew; use up to some thousands of values, its jackknife is quadratic) or "percentile".
    Raises ValueError on fewer than two values.
    """
    data = np.asarray(values, dtype=float)
    if data.ndim != 1 or len(data) < 2:
        raise ValueError("a bootstrap needs at least two values")
    if method not in ("bca", "percentile"):
        raise ValueError(f"unknown bootstrap method '{method}': bca or percentile")
    estimate = float(statistic(data, axis=-1))
    replicates = _resampled(data, statistic, lambda rows: rng.integers(0, len(data), (rows, len(data))), resamples)
    tails = ((1 - level) / 2, (1 + level) / 2)
    if method == "bca" and np.ptp(replicates) > 0:
        tails = _bca_levels(data, statistic, replicates, estimate, level)
    low, high = np.quantile(replicates, tails)
    return Interval(estimate, float(low), float(high), level)


def t_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> Interval:
    """Student interval of a mean: for few replications (below about 15) it covers better than any bootstrap."""
    from scipy.special import stdtrit

    data = np.asarray(values, dtype=float)
    if len(data) < 2:
        raise ValueError("an interval needs at least two values")
    reach = float(stdtrit(len(data) - 1, (1 + level) / 2)) * float(data.std(ddof=1)) / math.sqrt(len(data))
    mean = float(data.mean())
    return Interval(mean, mean - reach, mean + reach, level)


def paired_differences(baseline: Sequence[float] | np.ndarray, candidate: Sequence[float] | np.ndarray) -> np.ndarray:
    """Relative difference (candidate - baseline) / baseline of each pair of replications that shared their random numbers."""
    old, new = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    if old.shape != new.shape:
        raise ValueError(f"pairs are needed: {old.shape} against {new.shape}")
    same = old == new
    from_zero = np.where(same, 0.0, np.copysign(np.inf, new - old))
    return np.divide(new - old, np.abs(old), out=from_zero, where=old != 0)


def paired_interval(
    baseline: Sequence[float] | np.ndarray,
    candidate: Sequence[float] | np.ndarray,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = 2000,
    method: str = "bca",
) -> Interval:
    """Interval of the mean relative difference of paired replications; ``method`` "t", "bca" or "percentile"."""
    differences = paired_differences(baseline, candidate)
    if method == "t":
        return t_interval(differences, level=level)
    return bootstrap_interval(differences, rng=rng, level=level, resamples=resamples, method=method)


def quantile_interval(values: Sequence[float] | np.ndarray, quantile: float, *, level: float = 0.95) -> Interval:
    """Distribution-free interval of a quantile of *independent* values, from order statistics (binomial ranks).

    Conservative: it covers with at least ``level``. An end is infinite when there are too few values to bound that side.
    """
    from scipy.special import bdtr

    data = np.sort(np.asarray(values, dtype=float))
    n = len(data)
    if n == 0 or not 0 < quantile < 1:
        raise ValueError("a quantile interval needs values and a quantile inside (0, 1)")
    below = bdtr(np.arange(n, dtype=float), n, quantile)  # P(at most k values lie under the true quantile)
    tail = (1 - level) / 2
    lower = int(np.searchsorted(below, tail, side="right"))  # the largest rank whose left tail stays within
    upper = int(np.searchsorted(below, 1 - tail, side="left")) + 1
    low = float(data[lower - 1]) if lower >= 1 else -math.inf
    high = float(data[upper - 1]) if upper <= n else math.inf
    return Interval(float(np.quantile(data, quantile)), low, high, level)


def series_interval(
    values: Sequence[float] | np.ndarray,
    statistic: Statistic = np.mean,
    *,
    rng: np.random.Generator,
    block: int | None = None,
    level: float = 0.95,
    resamples: int = 500,
) -> Interval:
    """Interval of a statistic of a *correlated* series (latencies in order of arrival), by the moving-block bootstrap.

    ``block`` is the length resampled as a whole: it must exceed the memory of the queue; by default n^(1/2), at least 1.
    """
    data = np.asarray(values, dtype=float)
    n = len(data)
    if n < 2:
        raise ValueError("an interval needs at least two values")
    size = min(n, block or max(1, round(math.sqrt(n))))
    blocks = math.ceil(n / size)

    def indices(rows: int) -> np.ndarray:
        starts = rng.integers(0, n - size + 1, (rows, blocks, 1))
        return (starts + np.arange(size)).reshape(rows, blocks * size)[:, :n]

    replicates = _resampled(data, statistic, indices, resamples)
    low, high = np.quantile(replicates, ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(statistic(data, axis=-1)), float(low), float(high), level)


def mape_interval(
    real: Sequence[float] | np.ndarray,
    simulated: Sequence[float] | np.ndarray,
    *,
    rng: np.random.Generator,
    groups: Sequence | None = None,
    level: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Mean absolute error as a fraction of ``real``, with its bootstrap interval.

    ``groups`` names what was measured together (a run, a regime): whole groups are then resampled, since errors within one are alike.
    """
    truth, guess = np.asarray(real, dtype=float), np.asarray(simulated, dtype=float)
    if truth.shape != guess.shape or (truth == 0).any():
        raise ValueError("MAPE needs pairs of values whose real part is not zero")
    errors = np.abs(guess - truth) / np.abs(truth)
    if groups is None:
        return bootstrap_interval(errors, rng=rng, level=level, resamples=resamples, method="percentile")
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    sums, counts = np.bincount(member, weights=errors), np.bincount(member)
    if len(sums) < 2:
        raise ValueError("an interval over groups needs at least two of them")
    drawn = rng.integers(0, len(sums), (resamples, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(errors.mean()), float(low), float(high), level)


def sign_flip_p(differences: Sequence[float] | np.ndarray, *, rng: np.random.Generator, draws: int = 20_000) -> float:
    """One-sided p-value that the mean difference is above zero: how often random signs reach it. Exact up to 12 pairs."""
    data = np.asarray(differences, dtype=float)
    n = len(data)
    exact = n <= _EXACT_FLIPS
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = rng.choice((-1.0, 1.0), (draws, n))
    flipped = (signs * data).sum(axis=1)
    reached = np.count_nonzero(flipped >= data.sum() - 1e-12 * np.abs(data).sum())  # ties may differ by rounding
    return reached / len(signs) if exact else (reached + 1) / (draws + 1)


def t_p(differences: Sequence[float] | np.ndarray) -> float:
    """One-sided p-value of Student's test that the mean difference is above zero."""
    from scipy.special import stdtr

    data = np.asarray(differences, dtype=float)
    mean, spread = float(data.mean()), float(data.std(ddof=1))
    if spread == 0 or spread < 1e-12 * abs(mean):
        return 0.0 if mean > 0 else 1.0
    return float(1 - stdtr(len(data) - 1, mean / (spread / math.sqrt(len(data)))))


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's adjusted p-values: the chance of even one false alarm stays below the level they are compared with."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def benjamini_hochberg(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg adjusted p-values: bounds the expected share of false alarms among the alarms."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")[::-1]
    stepped = np.minimum.accumulate(p[order] * len(p) / np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


class Decision(NamedTuple):
    """What a gate says of one metric. ``worse`` is the relative change in the harmful direction, ``p`` after correction.

    ``verdict``: regressed, improved, unchanged (the interval stays within the tolerated effect) or undecided (it does not).
    """

    metric: str
    worse: Interval
    p: float
    verdict: str


_CORRECTIONS: Mapping[str, Callable] = {"holm": holm, "bh": benjamini_hochberg, "none": np.asarray}


def gate(
    worse: Mapping[str, Sequence[float] | np.ndarray],
    *,
    effect: float = 0.01,
    alpha: float = 0.01,
    correction: str = "holm",
) -> list[Decision]:
    """Decide each metric from its paired relative changes, positive meaning worse (negate throughput before).

    Regressed needs both: a mean change of at least ``effect`` (a certain but tiny change is no alarm) and a corrected
    one-sided p below ``alpha`` (a large but uncertain one is none either). Improved is the mirror image. The interval has level 1 - 2 alpha,
    so that without correction it agrees with the one-sided test. Raises KeyError on an unknown correction.
    """
    adjust = _CORRECTIONS[correction]
    names = list(worse)
    harm = adjust([t_p(worse[name]) for name in names])
    gain = adjust([t_p(-np.asarray(worse[name], dtype=float)) for name in names])
    decisions = []
    for name, p_harm, p_gain in zip(names, harm, gain):
        interval = t_interval(worse[name], level=1 - 2 * alpha)
        if p_harm < alpha and interval.estimate >= effect:
            verdict = "regressed"
        elif p_gain < alpha and interval.estimate <= -effect:
            verdict = "improved"
        else:
            verdict = "unchanged" if max(-interval.low, interval.high) < effect else "undecided"
        decisions.append(Decision(name, interval, float(p_harm), verdict))
    return decisions


def required_replications(differences: Sequence[float] | np.ndarray, effect: float, *, alpha: float = 0.01, power: float = 0.95) -> int:
    """Pairs needed to see a true mean change of ``effect`` with probability ``power`` in a one-sided test at ``alpha``.

    The spread is taken from the pairs at hand (at least two), so a pilot of few pairs gives a rough figure.
    """
    from scipy.special import stdtrit

    spread = float(np.asarray(differences, dtype=float).std(ddof=1))

    def settles(pairs: int) -> bool:
        reach = float(stdtrit(pairs - 1, 1 - alpha)) + float(stdtrit(pairs - 1, power))
        return reach * spread <= effect * math.sqrt(pairs)

    high = 2
    while not settles(high):
        high *= 2
    low = high // 2  # too few, unless high is the minimum itself
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if settles(middle) else (middle, high)
    return high
