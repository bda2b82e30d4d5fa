"""Decision parity: whatever the engine's loop decided, the simulator's scheduler decides from the recorded instants."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="the engine's extra is not installed")

from random_runs import SHIPPED, random_scenario, serve

from validate.parity import parity
from validate.rerun import differences

WORKLOADS = int(os.environ.get("TWINSERVE_PARITY_WORKLOADS", "4"))  # a policy; 200 is the figure to reach offline


@pytest.mark.parametrize("focus", SHIPPED, ids=" ".join)
def test_zero_differing_plans_on_random_workloads(focus, tmp_path):
    plans = preemptions = 0
    for number in range(WORKLOADS):
        scenario, rng = random_scenario(1000 * SHIPPED.index(focus) + number, focus)
        serve(scenario, rng, tmp_path / "run", wall=number % 4 == 3)
        result = parity(tmp_path / "run")
        assert result.differing_plans == 0, (number, result.first_difference)
        plans += result.plans
    assert plans > 20 * WORKLOADS


@pytest.mark.parametrize("number", range(16))
def test_recorded_durations_give_the_engines_instants_exactly(number, tmp_path):
    scenario, rng = random_scenario(77_000 + number, SHIPPED[number % len(SHIPPED)])
    serve(scenario, rng, tmp_path / "run", aborts=False)
    assert differences(tmp_path / "run", stepwise=True) == []
    assert differences(tmp_path / "run", stepwise=False) == []
