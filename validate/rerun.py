"""The gate without noise: the simulator, given an engine run's step durations, must reach the engine's plans and instants exactly."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from serving.errors import InputError
from serving.records import Run, open_run
from serving.scenario import Scenario, from_mapping

TIMES = ("arrival_s", "scheduled_s", "first_token_s", "finish_s")
COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "status")
PLAN_COLUMNS = ("step", "schedule_s", "commit_s", "submitted", "chunks", "preempted", "finished", "accepted")


def recorded_scenario(run: Run) -> Scenario:
    """The run's scenario with the run's own step durations as its latency model."""
    scenario = dict(run.info["scenario"])
    scenario["latency"] = {"name": "recorded", "run": str(run.path.resolve())}
    return from_mapping(scenario, shown=str(run.path / "run.yaml"))


def differences(folder: Path, *, stepwise: bool) -> list[str]:
    """Simulate the run in ``folder`` with its recorded step durations; return what differs, a sentence each, to the last bit.

    ``stepwise`` simulates one event per step and compares every plan too; else the simulator's fast mode is compared by what its requests
    saw and by its steps. Raises InputError when the run holds aborted or failed requests: the simulator's clients never give up.
    """
    from sim.run import simulate

    run = open_run(folder)
    if not run.requests["status"].isin(("completed", "rejected", "capacity")).all():
        raise InputError(str(folder), "holds requests that were aborted or failed: no client of the simulator does that")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        # The load factor is of no interest here: a known saturation spares measuring it.
        simulate(recorded_scenario(run), out=out, plans=stepwise, stepwise=stepwise, saturated_rps=1.0)
        simulated = open_run(out)
        found = _compare_requests(run, simulated)
        if stepwise:
            found += _compare_plans(run, simulated)
        if int(simulated.steps["steps"].sum()) != len(run.steps):
            found.append(f"{int(simulated.steps['steps'].sum())} simulated steps, {len(run.steps)} real ones")
    return found


def _compare_requests(run: Run, simulated: Run) -> list[str]:
    real, other = run.requests, simulated.requests
    if real["request_id"].tolist() != other["request_id"].tolist():
        return [f"{len(other)} simulated requests, {len(real)} real ones"]
    found = []
    for name in (*TIMES, *COUNTS):
        same = (real[name] == other[name]) | (real[name].isna() & other[name].isna())
        if not same.all():
            at = int((~same).to_numpy().argmax())
            found.append(f"request {real['request_id'].iat[at]}: {name} {real[name].iat[at]} in the engine, {other[name].iat[at]} simulated")
    return found


def _compare_plans(run: Run, simulated: Run) -> list[str]:
    real, other = run.plans, simulated.plans
    for at in range(min(len(real), len(other))):
        for name in [one for one in PLAN_COLUMNS if one in real]:
            left, right = _plain(real[name].iat[at]), _plain(other[name].iat[at])
            if left != right:
                return [f"plan {at}: {name} {left} in the engine, {right} simulated"]
    return [] if len(real) == len(other) else [f"{len(other)} simulated plans, {len(real)} real ones"]


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if hasattr(value, "__len__") and not isinstance(value, dict) else value
