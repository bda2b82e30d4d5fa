"""Arrival processes have the rate and the variation they are asked for, and end where they say."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from pydantic import TypeAdapter

from serving.errors import InputError
from serving.rng import stream
from serving.scenario.arrivals import Arrivals
from serving.workload.arrivals import instants

ADAPTER = TypeAdapter(Arrivals)


def times(spec: dict | str, *, chunks: int = 12, seed: int = 4, saturation_rps: object = None) -> np.ndarray:
    generator = instants(ADAPTER.validate_python(spec), stream(seed, "test"), saturation_rps)
    return np.concatenate(list(islice(generator, chunks)))


STEADY = [
    ({"process": "poisson", "rate_rps": 20.0}, 1.0),
    ({"process": "gamma", "rate_rps": 20.0, "cv": 3.0}, 3.0),
    ({"process": "gamma", "rate_rps": 20.0, "cv": 0.5}, 0.5),
    # Weibull of shape k: cv^2 = G(1 + 2/k) / G(1 + 1/k)^2 - 1
    ({"process": "weibull", "rate_rps": 20.0, "shape": 0.7}, math.sqrt(math.gamma(1 + 2 / 0.7) / math.gamma(1 + 1 / 0.7) ** 2 - 1)),
    ({"process": "constant", "rate_rps": 20.0}, 0.0),
]


@pytest.mark.parametrize(("spec", "cv"), STEADY)
def test_steady_processes_have_their_rate_and_variation(spec: dict, cv: float) -> None:
    arrivals = times(spec)
    gaps = np.diff(arrivals, prepend=0.0)
    error = 4.0 * max(cv, 1e-9) / math.sqrt(gaps.size)
    assert gaps.min() >= 0.0
    assert gaps.mean() * 20.0 == pytest.approx(1.0, abs=error)
    assert gaps.std() * 20.0 == pytest.approx(cv, abs=12.0 * error)


def test_poisson_is_not_cut_its_gaps_are_exponential_to_the_tail() -> None:
    gaps = np.sort(np.diff(times({"process": "poisson", "rate_rps": 5.0}), prepend=0.0)) * 5.0
    levels = (np.arange(gaps.size) + 0.5) / gaps.size
    distance = np.abs(1.0 - np.exp(-gaps) - levels).max()
    assert distance < 1.63 / math.sqrt(gaps.size)  # Kolmogorov-Smirnov, 1 %
    assert gaps[-1] > math.log(gaps.size) - 3.0


def test_constant_arrivals_are_exact_and_do_not_drift() -> None:
    arrivals = times({"process": "constant", "rate_rps": 3.0}, chunks=3)
    assert arrivals.tolist() == [(k + 1) / 3.0 for k in range(arrivals.size)]


def test_piecewise_counts_follow_each_piece_and_stop() -> None:
    pieces = [{"until_s": 100, "rate_rps": 40.0}, {"until_s": 200, "rate_rps": 0}, {"until_s": 300, "rate_rps": 80.0}]
    arrivals = times({"process": "piecewise", "pieces": pieces}, chunks=99)
    counts = np.histogram(arrivals, bins=[0, 100, 200, 300])[0]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(4000, abs=4 * math.sqrt(4000))
    assert counts[2] == pytest.approx(8000, abs=4 * math.sqrt(8000))
    assert arrivals.max() <= 300.0
    assert counts.sum() == arrivals.size


def test_open_last_piece_and_repetition_go_on() -> None:
    open_ended = times({"process": "piecewise", "pieces": [{"until_s": 10, "rate_rps": 100.0}, {"rate_rps": 1.0}]})
    assert np.count_nonzero(open_ended > 10.0) == pytest.approx(open_ended[-1] - 10.0, rel=0.03)
    again = times({"process": "piecewise", "repeat": True, "pieces": [{"until_s": 10, "rate_rps": 9.0}, {"until_s": 20, "rate_rps": 1.0}]})
    in_busy_half = np.count_nonzero(again % 20.0 < 10.0) / again.size
    assert in_busy_half == pytest.approx(0.9, abs=0.01)
    assert np.all(np.diff(again) >= 0)


def test_rate_per_minute_reproduces_each_minute() -> None:
    counts = [600.0, 0.0, 1200.0, 60.0]
    arrivals = times({"process": "rate_per_minute", "per_minute": counts, "rate_scale": 2.0}, chunks=99)
    seen = np.histogram(arrivals, bins=[0, 60, 120, 180, 240])[0]
    for got, expected in zip(seen, counts):
        assert got == pytest.approx(2 * expected, abs=4 * math.sqrt(2 * expected))


def test_diurnal_wave_peaks_where_it_should() -> None:
    arrivals = times({"process": "diurnal", "rate_rps": 10.0, "amplitude": 1.0, "period_s": 100.0, "peak_s": 30.0})
    phase = arrivals % 100.0
    by_slice = np.histogram(phase, bins=10, range=(0, 100))[0] / arrivals.size
    middle = np.arange(5.0, 100.0, 10.0)
    half = math.sin(math.pi / 10) / (math.pi / 10)  # mean of the cosine over a slice, as a fraction of its middle
    expected = 0.1 * (1.0 + half * np.cos(2 * math.pi * (middle - 30.0) / 100.0))
    assert by_slice == pytest.approx(expected, abs=0.006)
    assert np.all(np.diff(arrivals) >= 0)
    assert arrivals.size / arrivals[-1] == pytest.approx(10.0, rel=0.03)


def test_bursts_under_a_changing_rate_keep_the_rate() -> None:
    spec = {"process": "piecewise", "cv": 4.0, "pieces": [{"until_s": 1000, "rate_rps": 10.0}, {"until_s": 2000, "rate_rps": 30.0}]}
    counts = np.histogram(times(spec, chunks=99), bins=[0, 1000, 2000])[0]
    assert counts[1] / counts[0] == pytest.approx(3.0, rel=0.25)


def test_all_at_once_and_closed_loop_need_no_clock() -> None:
    assert set(times("all_at_once", chunks=2).tolist()) == {0.0}
    assert set(times({"process": "all_at_once", "at_s": 3.0}, chunks=1).tolist()) == {3.0}
    assert set(times({"process": "closed_loop", "users": 2}, chunks=1).tolist()) == {0.0}


def test_load_factor_asks_for_the_saturated_rate_once_and_only_when_needed() -> None:
    asked = []
    by_load = times({"process": "poisson", "load_factor": 0.5}, saturation_rps=lambda: asked.append(1) or 40.0)
    assert asked == [1]
    assert by_load.tolist() == times({"process": "poisson", "rate_rps": 20.0}, saturation_rps=lambda: pytest.fail("asked")).tolist()
    for saturation in (None, 0.0, math.nan, math.inf):
        with pytest.raises(InputError, match="saturated"):
            times({"process": "poisson", "load_factor": 0.5}, saturation_rps=saturation)


@pytest.mark.parametrize("spec", [each for each, _ in STEADY] + [{"process": "diurnal", "rate_rps": 3.0, "amplitude": 0.5}])
def test_equal_seeds_give_equal_arrivals(spec: dict) -> None:
    assert times(spec, chunks=2).tolist() == times(spec, chunks=2).tolist()
    if spec["process"] != "constant":
        assert times(spec, chunks=1).tolist() != times(spec, chunks=1, seed=5).tolist()
