"""Autoscaling policies on fleets whose state is written down, and the circuit breaker of admission."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from drivers import Case, request

from serving.errors import InputError
from serving.plan import Outcome
from serving.policies import load, names


@dataclass
class State:
    """A fleet as a policy sees it."""

    now_s: float = 0.0
    ready: int = 2
    starting: int = 0
    pending: int = 0
    outstanding_tokens: int = 0
    used: float = 0.5
    missed_s: list[float] = field(default_factory=list)

    @property
    def provisioned(self) -> int:
        return self.ready + self.starting

    def use(self, signal: str) -> float:
        return self.used

    def violations(self, window_s: float) -> int:
        return sum(at_s >= self.now_s - window_s for at_s in self.missed_s)


def targets(policy, states) -> list[int]:
    return [policy.target(state) for state in states]


def test_two_workers_at_seven_tenths_are_not_cut_to_one():
    """Case Q5: 0.7 · 2 / 1 = 1.4, above the threshold of 0.8."""
    policy = load("autoscaling", "utilisation", {"target": 0.8, "margin": 0.99, "hold_s": 0.0})
    assert policy.target(State(used=0.7)) == 2
    assert policy.target(State(used=0.39)) == 1, "0.78 on one"
    calm = load("autoscaling", "slo_violations", {"use": 0.8, "calm_s": 10.0})
    assert calm.target(State(now_s=100.0, used=0.7)) == 2
    assert calm.target(State(now_s=100.0, used=0.39)) == 1


@pytest.mark.parametrize("load_of", [0.3, 0.9, 1.7, 2.65, 3.1, 5.9])
@pytest.mark.parametrize("start", [1, 3, 8])
def test_a_constant_load_ends_all_changes(load_of, start):
    """The planner's flap: whatever the load and the beginning, the number of replicas settles, and neither too low nor too high."""
    policy = load("autoscaling", "utilisation", {"target": 0.75, "hold_s": 60.0})
    replicas, history = start, []
    for step in range(200):
        replicas = min(max(policy.target(State(now_s=15.0 * step, ready=replicas, used=min(1.0, load_of / replicas))), 1), 8)
        history.append(replicas)
    assert len(set(history[100:])) == 1
    assert load_of / history[-1] <= 0.75 or history[-1] == 8
    assert history[-1] == 1 or load_of / (history[-1] - 1) >= 0.75 * 0.9


def test_utilisation_grows_at_once_and_shrinks_after_a_hold_without_a_busy_moment():
    policy = load("autoscaling", "utilisation", {"target": 0.5, "hold_s": 30.0})
    assert policy.target(State(used=1.0)) == 4
    assert policy.target(State(used=1.0, starting=3)) == 5, "those that start are not given up"
    quiet = [State(now_s=15.0 * step, used=0.1) for step in range(5)]
    assert targets(policy, quiet[:3]) == [2, 2, 1]
    assert policy.target(State(now_s=40.0, used=0.4)) == 2, "a busy moment"
    assert targets(policy, [State(now_s=45.0 + 15 * step, used=0.1) for step in range(3)]) == [2, 2, 1]
    assert targets(policy, [State(now_s=100.0 + 15 * step, used=0.1, starting=1) for step in range(9)]) == [3] * 9, "not while one starts"
    assert policy.target(State(now_s=999.0, ready=0, starting=2, used=1.0)) == 2


def test_slo_violations_needs_all_three_and_gives_back_when_calm():
    """System A9: more than 2 violations in 5 minutes, more than 100 pending, use above 0.8."""
    policy = load("autoscaling", "slo_violations", {})
    bad = State(now_s=1000.0, pending=101, used=0.81, missed_s=[750.0, 800.0, 900.0])
    assert policy.target(bad) == 3
    for one in ({"pending": 100}, {"used": 0.8}, {"missed_s": [699.0, 800.0, 900.0]}):
        assert policy.target(State(**{**vars(bad), **one})) == 2, one
    assert policy.target(State(now_s=1000.0, used=0.3)) == 1
    for one in ({"pending": 1}, {"missed_s": [500.0]}, {"starting": 1}, {"ready": 1}, {"now_s": 599.0}):
        state = State(**{**vars(State(now_s=1000.0, used=0.3)), **one})
        assert policy.target(state) == state.provisioned, one


def test_queue_depth_follows_the_tokens_that_wait():
    policy = load("autoscaling", "queue_depth", {"tokens_per_replica": 1000.0, "margin": 0.5, "hold_s": 20.0})
    assert policy.target(State(outstanding_tokens=4001)) == 5
    assert policy.target(State(outstanding_tokens=2000)) == 2
    low = [State(now_s=10.0 * step, ready=3, outstanding_tokens=999) for step in range(3)]
    assert targets(policy, low) == [3, 3, 2]
    assert targets(policy, [State(now_s=100.0 + 10 * step, ready=3, outstanding_tokens=1001) for step in range(5)]) == [3] * 5
    assert policy.target(State(now_s=500.0, ready=1, outstanding_tokens=0)) == 1, "never none"


def test_all_shipped_autoscalers_are_here_and_refuse_nonsense():
    assert names("autoscaling") == ("queue_depth", "slo_violations", "utilisation")
    mistakes = {
        "queue_depth": [{"tokens_per_replica": 0}, {"margin": 1.0}, {"hold_s": -1}],
        "slo_violations": [{"window_s": 0}, {"violations": -1}, {"use": 1.5}, {"signal": "mood"}],
        "utilisation": [{"target": 0}, {"margin": 1}, {"hold_s": math.nan}, {"signal": "mood"}],
    }
    for name, options in mistakes.items():
        for each in options:
            with pytest.raises(InputError):
                load("autoscaling", name, each)


# -- the circuit breaker --------------------------------------------------------------------------------------------------


def left(finish_s: float, late: bool, status: str = "stop") -> Outcome:
    first_s = math.nan if status == "aborted" else finish_s - 0.1
    return Outcome("p1", 1, first_s - (2.0 if late else 0.1), first_s, first_s, finish_s, 10, 2, 0, status, 1.0)


def breaker(**options):
    return load("admission", "burn_rate", {"budget": 0.1, "burn": 2.0, "window_s": 10.0, "open_s": 3.0, "least": 5, **options})


def ask(policy, now_s: float, priority: int = 1) -> str | None:
    queue = Case().scheduler()
    queue.now_s = now_s
    return policy.admit(request(0, now_s, priority=priority), queue)


def test_the_breaker_opens_when_the_budget_burns_sheds_the_less_urgent_and_closes():
    policy = breaker()
    for step in range(8):
        policy.observe(left(1.0 + 0.1 * step, late=False))
    for step in range(2):
        policy.observe(left(2.0 + 0.1 * step, late=True))
    assert ask(policy, 2.2) is None, "two of ten are twice the budget, and not more"
    policy.observe(left(2.3, late=True))
    assert ask(policy, 2.4) == "burn_rate" and ask(policy, 5.2) == "burn_rate"
    assert ask(policy, 2.4, priority=0) is None, "the urgent still come in"
    assert ask(policy, 5.3) is None
    policy.observe(left(5.4, late=False))
    assert ask(policy, 5.5) == "burn_rate", "it burns still"
    policy.observe(left(20.0, late=False))
    assert ask(policy, 20.1) is None, "what was seen is forgotten after the window"


def test_the_breaker_needs_enough_outcomes_and_counts_whoever_never_got_a_token():
    policy = breaker()
    for step in range(4):
        policy.observe(left(1.0 + 0.1 * step, late=True))
    assert ask(policy, 2.0) is None
    policy.observe(left(2.0, late=False, status="aborted"))
    assert ask(policy, 2.1) == "burn_rate"


def test_the_breaker_refuses_what_can_never_fit_and_nonsense():
    queue = Case(blocks=5).scheduler()
    queue.now_s = 0.0
    assert breaker().admit(request(0, 0.0, 10_000), queue) == "kv_capacity"
    for options in ({"budget": 0.0}, {"budget": 1.0}, {"burn": 0}, {"window_s": 0}, {"open_s": 0}, {"least": 0}):
        with pytest.raises(InputError):
            breaker(**options)
