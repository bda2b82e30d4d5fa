"""A small run of the experiment that measures the gate's power: its parts do what the figures in docs/regress.md rest on."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import regress_power
from hwmodels.latency import LatencyModel
from serving import scenario
from serving.rng import stream
from validate.regress.drive import drive
from validate.regress.measure import sample
from validate.regress.suite import DEFAULT, load_suite


class Two:
    """Steps of two seconds."""

    def step_s(self, shape: object) -> float:
        return 2.0

    def run_s(self, shape: object, steps: int) -> list[float]:
        return [2.0] * steps


def test_steps_are_scaled_and_jitter_has_no_mean():
    latency: LatencyModel = regress_power.Steps(Two(), 1.5, 0.0, stream(0, "x"))
    assert latency.step_s(None) == 3.0 and latency.run_s(None, 2) == [3.0, 3.0]
    jittered = regress_power.Steps(Two(), 1.0, 0.02, stream(0, "x")).run_s(None, 20_000)
    assert np.mean(jittered) == pytest.approx(2.0, rel=2e-4) and 1.96 <= min(jittered) < max(jittered) <= 2.04


def test_a_pool_of_a_few_pairs_shows_a_large_slowdown_and_no_false_alarm():
    member = next(each for each in load_suite("default").members if each.name == "chat")
    raw = {**member.raw, "workload": {**member.raw["workload"], "requests": 400}}

    def pool(factor: float, jitter: float = 0.0) -> regress_power.Pool:
        runs = [regress_power.one(raw, member.seed(index), factor, jitter) for index in range(6)]
        return regress_power.Pool([each for each, _ in runs], [ttft_s for _, ttft_s in runs])

    base, slow, still = pool(1.0), pool(1.2), pool(1.0, regress_power.JITTER)
    assert slow.p99_s() > 1.1 * base.p99_s()
    trials = regress_power.Trials({"chat": base}, 6, 3, False)
    assert trials.count({"chat": slow}, "chat")[1] == 3
    assert trials.count({"chat": still}, "chat") == (0, 0)


def test_the_same_seed_gives_the_same_sample():
    loaded = scenario.load(DEFAULT / "two-classes.yaml", ["workload.requests=60"])
    one, two = (sample(drive(loaded), loaded.slo, 0.0, 0.0) for _ in range(2))
    assert one == two and one.classes.keys() == {"interactive", "background"}


def test_the_interval_of_a_proportion():
    assert regress_power.interval(0, 400) == (0.0, pytest.approx(0.0092, abs=1e-4))
    assert regress_power.interval(400, 400)[0] == pytest.approx(0.9908, abs=1e-4)
