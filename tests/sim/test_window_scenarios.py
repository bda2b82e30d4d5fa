"""Windows that adapt, each on its scenario: between the fixed windows that they choose from, and closer to what users asked for."""

from __future__ import annotations

import functools

from serving.scenario import load
from sim.run import simulate


@functools.cache
def run(name: str, window: str = "") -> dict:
    options = ["workload.requests=1500", *([f"policy.batching.window={window}"] if window else [])]
    return simulate(load(name, options), saturated_rps=1.0).summary


def test_a_window_by_objectives_saves_the_urgent_class_from_a_fixed_one_and_still_collects():
    adaptive, fixed, none = run("qos-window"), run("qos-window", "{name: fixed, size: 16, window_s: 0.2}"), run("qos-window", "none")
    urgent = [each["slo_attainment"]["by_class"]["p0"] for each in (fixed, adaptive, none)]
    assert urgent[0] + 0.3 < urgent[1] < urgent[2]
    assert fixed["tpot_s"]["mean"] < adaptive["tpot_s"]["mean"] < none["tpot_s"]["mean"]


def test_a_window_by_round_trips_lies_between_its_bounds_and_uses_the_room():
    adaptive, short, long = run("rtt-window"), run("rtt-window", "{name: fixed, size: 64, window_s: 0.05}"), run("rtt-window", "{name: fixed, size: 64, window_s: 0.2}")
    assert short["ttft_s"]["mean"] < adaptive["ttft_s"]["mean"] < long["ttft_s"]["mean"]
    assert long["tpot_s"]["mean"] < adaptive["tpot_s"]["mean"] < short["tpot_s"]["mean"]
    assert adaptive["slo_attainment"]["overall"] >= short["slo_attainment"]["overall"]
