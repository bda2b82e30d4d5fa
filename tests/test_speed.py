"""The simulator's speed, as a ratio to a reference loop timed around it: a guard against losing the fast path, not a record."""

from __future__ import annotations

import pytest

from benchmarks.simulator_speed import run_case


@pytest.mark.parametrize(
    ("case", "requests", "least_ratio"),
    [("saturated", 10_000, 3_500), ("priority", 10_000, 3_300), ("low-load", 5_000, 1_300), ("closed-loop", 10_000, 3_000), ("prefix", 10_000, 1_900)],
)
def test_a_case_keeps_half_of_the_speed_it_was_measured_at(case: str, requests: int, least_ratio: float):
    best = max(run_case(case, requests)["ratio"] for _ in range(2))
    assert best > least_ratio
