"""The simulator as a queue whose answers are known in closed form, each within the confidence interval of its own run.

Sources of the formulas: ``validate/queueing.py``. Seeds are fixed; intervals are batch means at 99.9 %, so that a wrong factor
fails and chance does not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from drivers import Case, Linear, request, serve

from serving.request import Arrival
from serving.rng import stream
from validate import queueing

SERVICE_S = 0.05
ONE_AT_A_TIME = Case(blocks=4097, max_batch_tokens=4096, max_batch_seqs=1, latency=Linear(SERVICE_S, 0.0, 0.0, 0.0))


def poisson(rate_rps: float, count: int, seed: int) -> np.ndarray:
    """Arrival times."""
    return np.cumsum(stream(seed, "arrivals").exponential(1 / rate_rps, count))


def assert_mean(samples: np.ndarray, expected: float, batches: int = 40) -> None:
    """``expected`` lies in the interval of the batch means of a correlated series (the first tenth is left out)."""
    samples = samples[len(samples) // 10 :]
    means = np.array([part.mean() for part in np.array_split(samples, batches)])
    half = 3.56 * means.std(ddof=1) / math.sqrt(batches)  # t(0.9995, 39)
    assert abs(means.mean() - expected) <= half, f"{means.mean():.4f} +- {half:.4f}, expected {expected:.4f}"
    assert half < 0.25 * expected, "the interval is too wide to say anything"


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_md1_one_step_per_request(load):
    arrivals = [Arrival(request(i, t, 16), 1) for i, t in enumerate(poisson(load / SERVICE_S, 20_000, seed=3).tolist())]
    columns = serve(ONE_AT_A_TIME, arrivals, record=False).columns
    assert_mean(columns["scheduled_s"] - columns["arrival_s"], queueing.md1(load / SERVICE_S, SERVICE_S).wait_s)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_mm1_exponential_lengths(load):
    """Geometric output lengths of mean 40 at a constant step: exponential service but for the width of a step."""
    count, mean_tokens, step_s = 12_000, 40, 0.01
    case = Case(blocks=4097, max_batch_tokens=4096, max_batch_seqs=1, latency=Linear(step_s, 0.0, 0.0, 0.0))
    lengths = stream(11, "lengths").geometric(1 / mean_tokens, count).tolist()
    rate_rps = load / (mean_tokens * step_s)
    arrivals = [Arrival(request(i, t, 16), n) for i, (t, n) in enumerate(zip(poisson(rate_rps, count, seed=5).tolist(), lengths))]
    columns = serve(case, arrivals, record=False).columns
    exact = queueing.mg1(rate_rps, mean_tokens * step_s, 1 - 1 / mean_tokens)  # of a geometric length: cv^2 = 1 - 1/mean
    assert exact.wait_s == pytest.approx(queueing.mm1(rate_rps, mean_tokens * step_s).wait_s, rel=0.02)
    assert_mean(columns["scheduled_s"] - columns["arrival_s"], exact.wait_s)


def test_littles_law_is_an_identity_of_the_records():
    """The time integral of the number present is the sum of sojourns: L = lambda W, exactly, for any policy."""
    case = Case(blocks=200, max_batch_seqs=8)
    rng = stream(2, "sizes")
    arrivals = [
        Arrival(request(i, t, int(rng.integers(1, 300))), int(rng.integers(1, 80))) for i, t in enumerate(poisson(6.0, 600, seed=1).tolist())
    ]
    served = serve(case, arrivals)
    columns, end_s = served.columns, served.cluster.end_s
    changes = sorted([(t, 1) for t in columns["arrival_s"].tolist()] + [(t, -1) for t in columns["finish_s"].tolist()])
    area, present, last_s = 0.0, 0, 0.0
    for at_s, change in changes:
        area += present * (at_s - last_s)
        present, last_s = present + change, at_s
    throughput_rps = len(arrivals) / end_s
    mean_sojourn_s = float((columns["finish_s"] - columns["arrival_s"]).mean())
    assert area / end_s == pytest.approx(queueing.littles_law_present(throughput_rps, mean_sojourn_s), rel=1e-9)
    assert served.summary["e2e_s"]["mean"] == pytest.approx(mean_sojourn_s, abs=1e-9)


def test_batch_of_one_by_hand():
    """Prompt 100 in chunks of 64, five tokens: two prefill steps, four decode steps, contexts 101 to 104."""
    case = Case(max_batch_tokens=64, latency=Linear(0.01, 1e-4, 1e-3, 1e-5))
    columns = serve(case, [Arrival(request(0, 0.25, 100), 5)]).columns
    first_s = 0.25 + (0.01 + 64e-4) + (0.01 + 36e-4)
    finish_s = first_s + 4 * (0.01 + 1e-3) + 1e-5 * (101 + 102 + 103 + 104)
    assert columns["scheduled_s"][0] == 0.25
    assert columns["first_token_s"][0] == pytest.approx(first_s, rel=1e-12)
    assert columns["finish_s"][0] == pytest.approx(finish_s, rel=1e-12)


def test_case_q1_far_beyond_saturation():
    """1,000 requests at 32 rps to a system that serves 1.10 rps; measured by its reporters: mean TTFT 433.9 s, 480 present."""
    count, offered_rps, served_rps, seats = 1000, 32.0, 1.10, 4
    steps = 50
    case = Case(blocks=4097, max_batch_tokens=4096, max_batch_seqs=seats, latency=Linear(seats / served_rps / steps, 0.0, 0.0, 0.0))
    arrivals = [Arrival(request(i, t, 16), steps) for i, t in enumerate(poisson(offered_rps, count, seed=8).tolist())]
    served = serve(case, arrivals, record=False)
    expected_s = queueing.overload_mean_wait_s(count, offered_rps, served_rps)
    assert expected_s == pytest.approx(438.9, abs=0.1)
    ttft_s = served.summary["ttft_s"]["mean"]
    assert abs(ttft_s - expected_s) < 0.02 * expected_s
    assert abs(ttft_s - 433.9) < 0.03 * 433.9
    present = queueing.littles_law_present(served_rps, served.summary["e2e_s"]["mean"])
    assert present == pytest.approx(480, rel=0.05)


def test_case_q2_the_knee():
    """A capacity that is off by 22 % around the knee is the difference between milliseconds and minutes."""
    mean_ttft_s = {}
    for factor in (1.0, 1 / 1.22):
        case = Case(blocks=4097, max_batch_tokens=4096, max_batch_seqs=1, latency=Linear(SERVICE_S / factor * 0.9, 0.0, 0.0, 0.0))
        arrivals = [Arrival(request(i, t, 16), 1) for i, t in enumerate(poisson(1 / SERVICE_S, 20_000, seed=4).tolist())]
        mean_ttft_s[factor] = serve(case, arrivals, record=False).summary["ttft_s"]["mean"]
    assert mean_ttft_s[1.0] < 1.0 < 40.0 < mean_ttft_s[1 / 1.22]
