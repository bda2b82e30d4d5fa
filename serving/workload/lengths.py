"""Draws from a scenario's distributions: whole tokens, or seconds. Vectorised; the stream does not depend on how it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from serving.errors import InputError
from serving.scenario.distributions import Constant, Distribution, Empirical, Exponential, Gamma, Lognormal, Normal, Uniform, Zipf
from serving.scenario.fields import data_file
from serving.workload.numbers_file import read_numbers

CHUNK = 4096
MAX_TOKENS = 10**9
Draw = Callable[[int], np.ndarray]


def tokens(spec: Distribution, rng: np.random.Generator, *, least: int = 1) -> Draw:
    """Return a function n -> n whole numbers (int64), each at least ``least``. Raises InputError when a data file is broken."""
    if isinstance(spec, Uniform):
        low, high = _edges(spec)
        whole_low, whole_high = max(least, round(low)), max(least, round(high))
        return lambda n: rng.integers(whole_low, whole_high + 1, n)
    draw = _draw(spec, rng)
    low, high = _clamp(spec)
    low, high = max(least, low), min(high, MAX_TOKENS)
    return lambda n: np.rint(np.clip(draw(n), low, max(low, high))).astype(np.int64)


def seconds(spec: Distribution, rng: np.random.Generator) -> Draw:
    """Return a function n -> n durations in seconds (float64), none negative. Raises InputError as ``tokens`` does."""
    draw = _draw(spec, rng)
    low, high = _clamp(spec)
    return lambda n: np.clip(draw(n), low, high)


def one_by_one(draw: Draw) -> Iterator:
    """Iterate over draws as plain Python numbers, endlessly."""
    return chain.from_iterable(iter(lambda: draw(CHUNK).tolist(), None))


def largest_tokens(spec: Distribution) -> int | None:
    """Return the largest value a draw can have, or None where the distribution has no end."""
    if isinstance(spec, Constant):
        return max(1, round(spec.value))
    if isinstance(spec, Uniform):
        return max(1, round(_edges(spec)[1]))
    if spec.max is not None:
        return max(1, round(spec.max))
    return max(1, round(float(_data(spec).max()))) if isinstance(spec, Empirical) else None


def _edges(spec: Uniform) -> tuple[float, float]:
    if spec.mean is None:
        return spec.min, spec.max
    return spec.mean * (1.0 - spec.spread), spec.mean * (1.0 + spec.spread)


def _clamp(spec: Distribution) -> tuple[float, float]:
    low, high = getattr(spec, "min", None), getattr(spec, "max", None)
    return (0.0 if low is None else low), (np.inf if high is None else high)


def _draw(spec: Distribution, rng: np.random.Generator) -> Draw:
    """Return the unclamped draw."""
    if isinstance(spec, Constant):
        return lambda n: np.full(n, spec.value)
    if isinstance(spec, Uniform):
        low, high = _edges(spec)
        return lambda n: low + (high - low) * rng.random(n)
    if isinstance(spec, Normal):
        return lambda n: spec.mean + spec.std * rng.standard_normal(n)
    if isinstance(spec, Lognormal):
        # The exponent is bounded so that a draw far out in the tail stays a finite number; the clamp decides its value.
        return lambda n: spec.median * np.exp(np.minimum(spec.sigma * rng.standard_normal(n), 300.0))
    if isinstance(spec, Exponential):
        return lambda n: spec.mean * rng.standard_exponential(n)
    if isinstance(spec, Gamma):
        shape = spec.cv**-2
        return lambda n: (spec.mean / shape) * rng.standard_gamma(shape, n)
    if isinstance(spec, Zipf):
        return _zipf(spec, rng)
    data = _data(spec)
    if spec.quantiles is not None:
        return lambda n: interpolate(data, rng.random(n))
    return lambda n: data[rng.integers(0, data.size, n)]


def interpolate(quantiles: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Return the values at ``level`` (0 to 1) of equally spaced ``quantiles``, linear between them."""
    position = level * (quantiles.size - 1)
    left = np.minimum(position.astype(np.int64), quantiles.size - 2)
    return quantiles[left] + (quantiles[left + 1] - quantiles[left]) * (position - left)


def _zipf(spec: Zipf, rng: np.random.Generator) -> Draw:
    ranks = np.arange(spec.min, spec.max + 1)
    cumulative = np.cumsum((ranks / spec.min) ** -spec.exponent)
    cumulative /= cumulative[-1]
    return lambda n: ranks[np.searchsorted(cumulative, rng.random(n), side="right").clip(max=ranks.size - 1)].astype(np.float64)


def _data(spec: Empirical) -> np.ndarray:
    if spec.file is None:
        return np.asarray(spec.quantiles if spec.quantiles is not None else spec.values, dtype=np.float64)
    data = read_numbers(data_file(spec.file), spec.column)
    if data.min() < 0:
        raise InputError(spec.file, "holds a negative number")
    return data
