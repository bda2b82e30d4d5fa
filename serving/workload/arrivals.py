"""Arrival instants: chunks of rising times in seconds, from a process of a scenario.

Processes with a changing rate run a unit-rate process in operational time u and map it back through the inverse of the
expected count L(t): arrivals at L^-1(u). That is exact for Poisson, and defines burstiness (cv) under a changing rate.
Gaps are never cut: a cut Poisson process has another rate than the one asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from serving.errors import InputError
from serving.scenario.arrivals import (
    AllAtOnce,
    Arrivals,
    ClosedLoop,
    ConstantGaps,
    Diurnal,
    GammaGaps,
    Piecewise,
    Poisson,
    RatePerMinute,
    WeibullGaps,
)
from serving.scenario.fields import data_file
from serving.workload.lengths import CHUNK, Draw
from serving.workload.table import read_rates

Saturation = Callable[[], float] | float | None


def instants(spec: Arrivals, rng: np.random.Generator, saturation_rps: Saturation = None) -> Iterator[np.ndarray]:
    """Yield chunks of arrival times (float64, seconds, not falling); endless unless the process itself ends.

    A closed loop yields zeros: its users set the times. ``saturation_rps`` turns ``load_factor`` into a rate; a function
    is called once, and only if needed. Raises InputError when a load factor is given but nothing to scale it with.
    """
    if isinstance(spec, AllAtOnce | ClosedLoop):
        at_s = spec.at_s if isinstance(spec, AllAtOnce) else 0.0
        while True:
            yield np.full(CHUNK, at_s)
    if isinstance(spec, ConstantGaps):
        yield from _evenly(_rate(spec.rate_rps, spec.load_factor, saturation_rps))
    elif isinstance(spec, Piecewise):
        ends = [piece.until_s for piece in spec.pieces]
        rates = [piece.rate_rps if piece.load_factor is None else _rate(None, piece.load_factor, saturation_rps) for piece in spec.pieces]
        yield from _stepwise(ends, rates, spec.repeat, _unit_gaps(spec.cv, rng))
    elif isinstance(spec, RatePerMinute):
        counts = spec.per_minute if spec.per_minute is not None else read_rates(data_file(spec.table))
        ends = [60.0 * (minute + 1) for minute in range(len(counts))]
        yield from _stepwise(ends, [count * spec.rate_scale / 60.0 for count in counts], spec.repeat, _unit_gaps(spec.cv, rng))
    else:
        rate = _rate(spec.rate_rps, spec.load_factor, saturation_rps)
        if isinstance(spec, Diurnal):
            yield from _wave(spec, rate, _unit_gaps(spec.cv, rng))
        else:
            for expected in _operational(_steady_gaps(spec, rng)):
                yield expected / rate


def _rate(rate_rps: float | None, load_factor: float | None, saturation_rps: Saturation) -> float:
    if load_factor is None:
        return rate_rps
    saturated = saturation_rps() if callable(saturation_rps) else saturation_rps
    if saturated is None:
        raise InputError("workload.arrivals.load_factor", "nothing says here what the saturated rate is", "give rate_rps")
    if not 0.0 < saturated < math.inf:
        raise InputError("workload.arrivals.load_factor", f"the saturated rate is {saturated} requests per second", "give rate_rps")
    return load_factor * saturated


def _steady_gaps(spec: Poisson | GammaGaps | WeibullGaps, rng: np.random.Generator) -> Draw:
    if isinstance(spec, GammaGaps):
        return _unit_gaps(spec.cv, rng)
    if isinstance(spec, WeibullGaps):
        scale = 1.0 / math.gamma(1.0 + 1.0 / spec.shape)
        return lambda n: scale * rng.weibull(spec.shape, n)
    return rng.standard_exponential


def _unit_gaps(cv: float, rng: np.random.Generator) -> Draw:
    """Gaps of mean 1 and coefficient of variation ``cv``."""
    if cv == 1.0:
        return rng.standard_exponential
    shape = cv**-2
    return lambda n: rng.standard_gamma(shape, n) / shape


def _operational(gaps: Draw) -> Iterator[np.ndarray]:
    """Running sums of gaps of mean 1: the expected count at each arrival."""
    total = 0.0
    while True:
        chunk = gaps(CHUNK)
        chunk[0] += total
        np.add.accumulate(chunk, out=chunk)
        total = chunk[-1]
        yield chunk


def _evenly(rate: float) -> Iterator[np.ndarray]:
    first = 1
    while True:
        yield np.arange(first, first + CHUNK) / rate
        first += CHUNK


def _stepwise(ends: list[float | None], rates: list[float], repeat: bool, gaps: Draw) -> Iterator[np.ndarray]:
    """Constant rates between instants. Ends with the last piece, unless it is open or the whole repeats."""
    known = [end for end in ends if end is not None]
    edges = np.array([0.0, *known])
    expected = np.concatenate([[0.0], np.cumsum(np.diff(edges) * np.array(rates[: len(known)]))])
    open_rate = rates[-1] if ends[-1] is None else 0.0
    for count in _operational(gaps):
        if repeat:
            rounds, rest = np.divmod(count, expected[-1])
            yield rounds * edges[-1] + np.interp(rest, expected, edges)
            continue
        times = np.interp(count, expected, edges)
        after = count > expected[-1]
        if open_rate > 0.0:
            times[after] = edges[-1] + (count[after] - expected[-1]) / open_rate
            yield times
        else:
            yield times[~after]
            if after[-1]:
                return


def _wave(spec: Diurnal, rate: float, gaps: Draw) -> Iterator[np.ndarray]:
    """L(t) = rate (t + a/w (sin w(t - peak) + sin w peak)), inverted by bisection: robust where the rate touches zero."""
    turn = 2.0 * math.pi / spec.period_s
    swing = spec.amplitude / turn
    offset = swing * math.sin(turn * spec.peak_s)
    for count in _operational(gaps):
        even = count / rate
        low, high = np.maximum(even - 2.0 * swing, 0.0), even + 2.0 * swing
        for _ in range(52):  # bits of a double's fraction
            middle = 0.5 * (low + high)
            early = middle + swing * np.sin(turn * (middle - spec.peak_s)) + offset < even
            low, high = np.where(early, middle, low), np.where(early, high, middle)
        yield np.maximum.accumulate(high)
