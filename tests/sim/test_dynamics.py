"""Fleets that change: no request is lost or served twice, whatever breaks and whoever scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
from changing_fleets import COLD_S, Changed, random_faults, serve_changing
from drivers import Case, Linear, random_arrivals, random_case, request

from serving.errors import BrokenPolicyError
from serving.metrics import ABORTED, CAPACITY, COMPLETED, ERROR, REJECTED
from serving.policies import load
from serving.request import Arrival
from serving.scenario.dynamics import Fault, Faults
from sim.dynamics import DRAINING, LOST, OFF, READY, STARTING, Fleet

FLAT = Linear(0.1, 0.0, 0.0, 0.0)  # every step takes 0.1 s


class Erratic:
    """Wants any number of replicas, also none and too many."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def target(self, fleet) -> int:
        return int(self._rng.integers(0, 6))


class Script:
    """Wants what a list says, decision by decision; then as many as there are."""

    def __init__(self, *wanted: int) -> None:
        self._wanted = list(wanted)

    def target(self, fleet) -> int:
        return self._wanted.pop(0) if self._wanted else fleet.provisioned


def losing(*events: Fault, **options: object) -> Faults:
    return Faults(events=events, **options)


def assert_each_left_once(changed: Changed, arrivals: list[Arrival]) -> None:
    outcomes = changed.outcomes()
    assert set(outcomes) == {arrival.request.request_id for arrival in arrivals}
    assert sorted(request_id for request_id, _ in changed.told) == sorted(outcomes), "whoever waits must be told once"
    columns = changed.served.columns
    arrived = dict(zip(columns["request_id"].tolist(), columns["arrival_s"].tolist()))
    assert all(arrived[arrival.request.request_id] == arrival.request.arrival_s for arrival in arrivals)
    tokens = dict(zip(columns["request_id"].tolist(), columns["output_tokens"].tolist()))
    for arrival in arrivals:
        if outcomes[arrival.request.request_id] == COMPLETED:
            assert tokens[arrival.request.request_id] == min(arrival.output_tokens, arrival.request.max_output_tokens)
    assert changed.fleet.ledger.failed == sum(status == ERROR for status in outcomes.values())


@pytest.mark.parametrize("seed", range(24))
def test_random_faults_and_scaling_conserve_requests(seed):
    case = random_case(seed, replicas=3)
    arrivals = random_arrivals(seed, case)
    policy = Erratic(seed) if seed % 3 else None
    changed = serve_changing(case, arrivals, faults=random_faults(seed, 3), policy=policy, ready=2 if policy else 3, seed=seed)
    assert_each_left_once(changed, arrivals)


def test_the_random_fleets_are_worth_it():
    seen = dict.fromkeys(("lost", "retried", "failed", "draining", "stall", "slow", "held"), 0)
    for seed in range(24):
        case = random_case(seed, replicas=3)
        held: list[int] = []
        changed = serve_changing(
            case, random_arrivals(seed, case), faults=random_faults(seed, 3), policy=Erratic(seed) if seed % 3 else None, seed=seed,
            probe=lambda fleet, held=held: [fleet.at(0.1 * i, lambda: held.append(fleet.cluster.held)) for i in range(1, 50)],
        )  # fmt: skip
        states = [state for _, _, state in changed.fleet.ledger.changes]
        kinds = [strike.fault.kind for strike in changed.injector.struck]
        seen["lost"] += states.count(LOST)
        seen["draining"] += states.count(DRAINING)
        seen["retried"] += changed.fleet.ledger.retried
        seen["failed"] += changed.fleet.ledger.failed
        seen["stall"] += kinds.count("host_stall")
        seen["slow"] += kinds.count("slow_gpu")
        seen["held"] += sum(held)
    assert min(seen.values()) >= 10, seen


@pytest.mark.parametrize("seed", range(100, 116))
def test_fast_equals_stepwise(seed):
    case = random_case(seed, replicas=3)
    arrivals = random_arrivals(seed, case)
    options = {"faults": random_faults(seed, 3), "ready": 2, "seed": seed}
    fast, slow, audited = (
        serve_changing(case, arrivals, policy=Erratic(seed) if seed % 3 else None, stepwise=stepwise, audit_share=share, **options)
        for stepwise, share in ((False, 0.0), (True, 0.0), (False, 0.5))
    )
    assert fast.fleet.ledger == slow.fleet.ledger == audited.fleet.ledger
    for name, left, right, third in zip(
        ("requests", "summary", "gaps", "plans", "accounts"),
        fast.served.comparable(),
        slow.served.comparable(),
        audited.served.comparable(),
    ):
        assert left == right == third, name


# -- faults, exactly ------------------------------------------------------------------------------------------------------


def test_a_stall_delays_the_step_being_executed_and_nothing_else():
    arrivals = [Arrival(request(0, 1.0), 10)]
    calm = serve_changing(Case(latency=FLAT), arrivals, faults=losing(Fault(kind="host_stall", at_s=50.0, for_s=2.0)))
    stalled = serve_changing(Case(latency=FLAT), arrivals, faults=losing(Fault(kind="host_stall", at_s=1.45, for_s=2.0, replica=0)))
    assert calm.served.columns["finish_s"][0] == pytest.approx(2.0)
    assert stalled.served.columns["finish_s"][0] == pytest.approx(4.0)
    assert stalled.served.columns["first_token_s"][0] == pytest.approx(1.1)
    assert stalled.served.summary["itl_s"]["max"] == pytest.approx(2.1)
    during = losing(*(Fault(kind="host_stall", at_s=at_s, for_s=2.0, replica=0) for at_s in (1.45, 2.0)))
    assert serve_changing(Case(latency=FLAT), arrivals, faults=during).served.columns["finish_s"][0] == pytest.approx(4.55), "1.45 to 4.0"
    idle = serve_changing(Case(latency=FLAT), arrivals, faults=losing(Fault(kind="host_stall", at_s=0.5, for_s=2.0, replica=0)))
    assert idle.served.comparable() == calm.served.comparable(), "an idle replica has no step to delay"


def test_a_slow_gpu_takes_its_factor_longer_from_its_next_step_on_and_of_overlapping_faults_the_worst_counts():
    case, arrivals = Case(latency=FLAT), [Arrival(request(0, 1.0), 12)]
    slow = Fault(kind="slow_gpu", at_s=1.25, for_s=0.6, replica=0, factor=2.0)
    ends = serve_changing(case, arrivals, faults=losing(slow)).served.decisions[0]
    # Steps that start in [1.25, 1.85): those at 1.3, 1.5 and 1.7 take 0.2 s; the one at 1.9 is as fast as ever.
    assert ends[-1][1] == pytest.approx(1.0 + 9 * 0.1 + 3 * 0.2)
    both = losing(slow, Fault(kind="slow_gpu", at_s=1.35, for_s=0.2, replica=0, factor=6.0))
    # 1.3 doubled to 1.5; at 1.5 six times as slow, to 2.1: by then both have ended.
    assert serve_changing(case, arrivals, faults=both).served.decisions[0][-1][1] == pytest.approx(1.3 + 0.2 + 0.6 + 7 * 0.1)


def test_what_a_lost_replica_held_begins_again_elsewhere_and_it_comes_back_empty():
    case = Case(latency=FLAT, replicas=2)
    arrivals = [Arrival(request(0, 1.0), 20), Arrival(request(1, 1.0), 20), Arrival(request(2, 3.0), 5)]
    changed = serve_changing(case, arrivals, faults=losing(Fault(kind="replica_loss", at_s=1.55, for_s=0.5, replica=0)))
    columns = changed.served.columns
    assert columns["replica"].tolist() == [1, 1, 0]
    # At 1.55 replica 1 executes a step until 1.6; the retried prompt joins the one that begins then.
    assert columns["first_token_s"][0] == pytest.approx(1.7) and columns["finish_s"][0] == pytest.approx(1.6 + 2.0)
    assert columns["finish_s"][1] == pytest.approx(3.0)
    assert changed.fleet.ledger.changes == [(1.55, 0, LOST), (2.05, 0, STARTING), (pytest.approx(2.05 + COLD_S), 0, READY)]
    # The five tokens before the loss were seen: four gaps, as many as had ended by then, beside all of the others'.
    assert int(changed.served.metrics.itl_gaps._bins.sum()) == 4 + 19 + 19 + 4


def test_requests_wait_while_no_replica_is_there():
    arrivals = [Arrival(request(0, 1.0), 3), Arrival(request(1, 1.7), 2)]
    changed = serve_changing(Case(latency=FLAT), arrivals, faults=losing(Fault(kind="replica_loss", at_s=1.25, for_s=1.0, replica=0)))
    back_s = 2.25 + COLD_S
    assert changed.served.columns["first_token_s"].tolist() == [pytest.approx(back_s + 0.1)] * 2
    assert changed.served.columns["arrival_s"].tolist() == [1.0, 1.7]


@pytest.mark.parametrize("policy", ["retry", "fail"])
def test_lost_requests_fail_when_they_may_not_be_retried(policy):
    faults = losing(Fault(kind="replica_loss", at_s=1.25, for_s=0.1, replica=0), lost_requests=policy, retries=0)
    changed = serve_changing(Case(latency=FLAT), [Arrival(request(0, 1.0), 9)], faults=faults)
    assert changed.outcomes() == {0: ERROR}
    assert changed.told == [(0, "error")]
    assert changed.served.summary["requests"] == {"arrived": 1, "completed": 0, "rejected": 0, "failed": 1, "preempted": 0}


def test_a_loss_while_starting_starts_over_and_one_while_draining_does_not_come_back():
    arrivals = [Arrival(request(0, 1.0), 40), Arrival(request(1, 1.0), 40), Arrival(request(2, 3.0), 30)]
    faults = losing(Fault(kind="replica_loss", at_s=1.2, for_s=0.3, replica=0), Fault(kind="replica_loss", at_s=1.7, for_s=0.3, replica=0))
    changed = serve_changing(Case(latency=FLAT, replicas=2), arrivals, faults=faults)
    assert changed.fleet.ledger.changes == [
        (1.2, 0, LOST), (1.5, 0, STARTING), (1.7, 0, LOST), (2.0, 0, STARTING), (pytest.approx(2.0 + COLD_S), 0, READY),
    ]  # fmt: skip
    drained = losing(Fault(kind="replica_loss", at_s=0.9, for_s=0.3, replica=1))
    changed = serve_changing(Case(latency=FLAT, replicas=2), arrivals, faults=drained, policy=Script(2, 1), bounds=(1, 2), interval_s=0.55)
    assert [(index, state) for _, index, state in changed.fleet.ledger.changes][:2] == [(1, LOST), (1, OFF)], (
        "a lost one is given back first"
    )
    changed = serve_changing(
        Case(latency=FLAT, replicas=2), arrivals, faults=losing(Fault(kind="replica_loss", at_s=1.3, for_s=0.3, replica=1)),
        policy=Script(2, 1), bounds=(1, 2), interval_s=0.55,
    )  # fmt: skip
    assert [(at_s, state) for at_s, index, state in changed.fleet.ledger.changes] == [(1.1, DRAINING), (1.3, OFF)]
    assert changed.fleet.ledger.retried == 1


@pytest.mark.parametrize(
    "fault",
    [Fault(kind="replica_loss", every_s=0.4, for_s=0.5), Fault(kind="slow_gpu", every_s=0.2, for_s=5.0, factor=2.0)],
    ids=["loss", "slow"],
)
def test_faults_that_outlast_their_gaps_end_with_the_work(fault):
    arrivals = [Arrival(request(i, 0.5 * i), 4) for i in range(1, 6)]
    changed = serve_changing(Case(latency=FLAT, replicas=2), arrivals, faults=losing(fault))
    assert max(strike.at_s for strike in changed.injector.struck) < changed.served.cluster.end_s + 5.0
    assert_each_left_once(changed, arrivals)


def test_faults_at_random_find_replicas_in_service():
    arrivals = [Arrival(request(i, 0.1 * i), 4) for i in range(1, 60)]
    faults = losing(Fault(kind="host_stall", every_s=0.1, for_s=0.01))
    changed = serve_changing(Case(latency=FLAT, replicas=3), arrivals, faults=faults, policy=Script(), ready=1)
    assert {strike.replica for strike in changed.injector.struck} == {0}


# -- scaling, exactly ---------------------------------------------------------------------------------------------------


def test_nothing_reaches_a_replica_before_it_is_ready_and_a_drained_one_ends_what_it_holds():
    arrivals = [Arrival(request(i, 1.0 + 0.05 * i), 30) for i in range(60)]
    changed = serve_changing(Case(latency=FLAT, replicas=2), arrivals, policy=Script(2, 2, 2, 2, 1), bounds=(1, 2), ready=1)
    ready_s = 0.5 + COLD_S
    drain_s = 2.5
    assert changed.fleet.ledger.changes[:3] == [(0.5, 1, STARTING), (pytest.approx(ready_s), 1, READY), (drain_s, 1, DRAINING)]
    columns = changed.served.columns
    second = columns["replica"] == 1
    assert second.any() and (columns["arrival_s"][second] >= ready_s).all() and (columns["arrival_s"][second] <= drain_s).all()
    assert changed.fleet.ledger.changes[3] == (pytest.approx(columns["finish_s"][second].max()), 1, OFF)
    assert (columns["status_code"] == COMPLETED).all()


def test_a_draining_replica_is_taken_back_without_a_cold_start():
    arrivals = [Arrival(request(i, 1.0), 40) for i in range(4)]
    changed = serve_changing(Case(latency=FLAT, replicas=2), arrivals, policy=Script(2, 2, 1, 2), bounds=(1, 2))
    assert changed.fleet.ledger.changes == [(1.5, 1, DRAINING), (2.0, 1, READY)]


def test_provisioned_time_is_what_is_paid():
    arrivals = [Arrival(request(0, 1.0), 40), Arrival(request(1, 1.0), 20)]
    changed = serve_changing(Case(latency=FLAT, replicas=3), arrivals, policy=Script(3, 3, 3, 1), bounds=(1, 3), ready=1)
    fleet, end_s = changed.fleet, changed.served.cluster.end_s
    assert end_s == pytest.approx(5.0)
    # One all the time; two more from 0.5 until they drain at 2.0: one at once, for it holds nothing, the other at 3.0.
    assert fleet.provisioned_s(end_s) == pytest.approx(5.0 + 1.5 + 2.5)
    assert fleet.provisioned_s(1.0) == pytest.approx(1.0 + 2 * 0.5)
    assert fleet.provisioned_s(0.0) == 0.0
    late = serve_changing(
        Case(latency=FLAT, replicas=2), arrivals, faults=losing(Fault(kind="replica_loss", at_s=3.5, for_s=60.0, replica=1))
    )
    assert late.fleet.ledger.changes[-1][0] > 60, "its process is started again after the end"
    assert late.fleet.provisioned_s(late.served.cluster.end_s) == pytest.approx(2 * late.served.cluster.end_s), (
        "which costs nothing any more"
    )


@pytest.mark.parametrize("answer", [None, 2.5, "two"])
def test_a_policy_that_names_no_number_is_named(answer):
    class Odd:
        def target(self, fleet):
            return answer

    with pytest.raises(BrokenPolicyError, match=r"Odd at 0\.500000 s: target must be a whole number"):
        serve_changing(Case(latency=FLAT, replicas=2), [Arrival(request(0, 1.0), 3)], policy=Odd())


def test_busy_counts_from_when_a_replica_became_ready():
    seen: list[float] = []

    class Watching(Script):
        def target(self, fleet) -> int:
            seen.append(fleet.use("busy"))
            return super().target(fleet)

    arrivals = [Arrival(request(i, 0.9 + 0.01 * i), 100) for i in range(2)]
    serve_changing(Case(latency=FLAT, replicas=2), arrivals, policy=Watching(2), bounds=(1, 2), ready=1)
    # Ready at 0.9; requests come at 0.9 and 0.91, one to each: both are busy from then on, and were half idle before.
    assert seen[0] == 0.0
    assert seen[1] == pytest.approx(((0.1 / 0.5) + (0.09 / 0.1)) / 2)
    assert seen[2:8] == [1.0] * 6


def test_an_autoscaler_sees_what_waits_for_a_replica():
    seen: list[tuple[int, int, int]] = []

    class Watching(Script):
        def target(self, fleet) -> int:
            seen.append((fleet.ready, fleet.pending, fleet.outstanding_tokens))
            return super().target(fleet)

    arrivals = [Arrival(request(i, 0.8, prompt=100), 3) for i in range(3)]
    faults = losing(Fault(kind="replica_loss", at_s=0.2, for_s=1.0, replica=0))
    serve_changing(Case(latency=FLAT), arrivals, policy=Watching(), faults=faults, bounds=(1, 1))
    assert seen[:2] == [(0, 0, 0), (0, 3, 300)]


def test_load_policies_hold_a_fleet_of_constant_load_still():
    """One request every 50 ms, each of 20 steps of 0.1 s: 40 seats are taken all the time, in a fleet with 16 a replica."""
    arrivals = [Arrival(request(i, 0.05 * i), 20) for i in range(1, 1200)]
    case = Case(latency=FLAT, replicas=8, blocks=400, max_batch_tokens=1024)
    policies = [
        load("autoscaling", "utilisation", {"target": 0.8, "hold_s": 3.0}),
        load("autoscaling", "utilisation", {"target": 0.8, "hold_s": 3.0, "signal": "kv"}),
        load("autoscaling", "queue_depth", {"tokens_per_replica": 500.0, "hold_s": 3.0}),
    ]
    for policy in policies:
        changed = serve_changing(case, arrivals, policy=policy, bounds=(1, 8), interval_s=1.0, ready=8)
        settled = [change for change in changed.fleet.ledger.changes if 40.0 < change[0] < 59.0]
        assert not settled, (type(policy).__name__, changed.fleet.ledger.changes)
        assert (changed.served.columns["status_code"] == COMPLETED).all()


def test_statuses_have_the_meanings_these_tests_give_them():
    assert (COMPLETED, REJECTED, CAPACITY, ABORTED, ERROR) == (0, 1, 2, 3, 4)


def test_states_count_and_never_go_below_what_is_there():
    class Nobody(Script):
        def target(self, fleet) -> int:
            return -7

    changed = serve_changing(Case(latency=FLAT, replicas=3), [Arrival(request(0, 1.0), 9)], policy=Nobody(), bounds=(1, 3))
    assert changed.fleet.count(READY) == 1 and changed.fleet.count(OFF) == 2
    assert not math.isnan(changed.served.columns["finish_s"][0])
    assert isinstance(changed.fleet, Fleet)
