"""Adapters in slots: case S12, who passes whom and how often, what a running sequence keeps, what a load costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.adapters import AdapterSlots, adapter_bytes
from serving.catalog import load_llm
from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.plan import StepResult
from serving.policies import Limits, Policies, load
from serving.request import Request
from serving.scenario import load as load_scenario
from serving.scheduler import Scheduler
from sim.run import simulate


def scheduler(slots: int, *, max_bypasses: int = 64, policy: str = "lru", seats: int = 32, blocks: int = 400, **ordering: object) -> Scheduler:
    kinds = {"batching": "chunked_prefill", "window": "none", "preemption": "lowest_priority", "admission": "fits"}
    order = load("ordering", "priority", ordering) if ordering else load("ordering", "fcfs")
    parts = [order, *(load(kind, name) for kind, name in kinds.items())]
    adapters = AdapterSlots(slots, load("adapters", policy), max_bypasses)
    return Scheduler(KVPool(blocks, 16), Policies(*parts, Limits(4096, seats), adapters=adapters))


def submit(queue: Scheduler, names: list[str], first: int = 0, **facts: int) -> None:
    for index, name in enumerate(names, first):
        queue.submit(Request(index, 0.0, 20, 100, adapter=name, **facts), 0.0)


def step(queue: Scheduler, finish: tuple[int, ...] = (), now_s: float = 0.0):
    plan = queue.schedule(now_s)
    ended = [(seq, "stop") for seq in queue.live() if seq.request_id in finish]
    queue.commit(plan, StepResult(now_s, ended))
    queue.check()
    return plan


def test_four_slots_take_all_but_the_requests_of_a_fifth_adapter():
    """Case S12."""
    queue = scheduler(4)
    submit(queue, [*[""] * 3, "A1", "A3", "A2", "A4", *["A5"] * 4, "", "", "A1", "A2", "A3"])
    plan = step(queue)
    waiting = [seq.request for seq in queue.live() if seq not in plan.admitted]
    assert [request.adapter for request in waiting] == ["A5"] * 4
    assert len(plan.admitted) == 12 and plan.adapter_loads == plan.adapters == 4


def test_a_slot_that_nobody_uses_any_more_goes_to_the_first_that_waits():
    queue = scheduler(2)
    submit(queue, ["A1", "A2", "A3", "A1"])
    assert [seq.request_id for seq in step(queue).admitted] == [0, 1, 3]
    step(queue, finish=(0,))
    assert not step(queue).admitted, "A1 still has a user"
    step(queue, finish=(3,))
    plan = step(queue)
    assert [seq.request_id for seq in plan.admitted] == [2] and plan.adapter_loads == 1
    assert sorted(queue.policies.adapters.loaded()) == ["A2", "A3"]


def test_a_running_task_keeps_its_version_while_new_ones_take_the_next():
    queue = scheduler(2)
    submit(queue, ["A:v1"])
    step(queue)
    submit(queue, ["A:v2", "A:v2"], first=1)
    plan = step(queue)
    assert [seq.request.adapter for seq in plan.admitted] == ["A:v2", "A:v2"]
    assert plan.adapter_loads == 1, "two that want the same share one load"
    assert queue.policies.adapters.in_use == 2


def test_a_blocked_head_is_passed_as_often_as_the_bound_says_and_no_more():
    queue = scheduler(1, max_bypasses=3)
    submit(queue, ["A1", "A2", *[""] * 6])
    assert [seq.request_id for seq in step(queue).admitted] == [0, 2, 3, 4]
    assert not step(queue).admitted
    step(queue, finish=(0,))
    assert [seq.request_id for seq in step(queue).admitted] == [1, 5, 6, 7]


def test_nobody_is_evicted_for_an_urgent_request_that_has_no_slot():
    queue = scheduler(1, seats=2, preempt="strict")
    submit(queue, ["A1", ""], priority=1)
    step(queue)
    submit(queue, ["A2"], first=2, priority=0)
    assert not step(queue).preempted
    submit(queue, [""], first=3, priority=0)
    assert not step(queue).preempted, "the head cannot run, and those behind it do not evict in its stead"


def test_a_preempted_sequence_gives_its_slot_back_and_takes_one_again():
    queue = scheduler(1, seats=1, preempt="strict")
    submit(queue, ["A1"], priority=1)
    step(queue)
    submit(queue, [""], first=1, priority=0)
    assert [seq.request_id for seq in step(queue).preempted] == [0]
    assert queue.policies.adapters.in_use == 0
    step(queue, finish=(1,))
    plan = step(queue)
    assert [seq.request_id for seq in plan.admitted] == [0] and plan.adapter_loads == 0, "it was still there"


def test_the_least_wanted_adapter_leaves():
    queue = scheduler(2, policy="least_wanted", seats=2)
    submit(queue, ["A1", "A2"])
    step(queue)
    submit(queue, ["A3", "A1", "A1"], first=2)
    step(queue, finish=(0, 1))
    step(queue)
    assert queue.policies.adapters.loads == 3 and queue.policies.adapters.hits == 1
    assert sorted(queue.policies.adapters.loaded()) == ["A1", "A3"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d", "e"]), st.integers(1, 6)), min_size=1, max_size=40))
def test_slots_never_hold_more_than_they_can_and_everybody_is_served(slots, jobs):
    queue = scheduler(slots, seats=8, max_bypasses=5)
    submit(queue, [name for name, _ in jobs])
    left = {index: steps for index, (_, steps) in enumerate(jobs)}
    for _ in range(20 * len(jobs)):
        if not queue.has_work:
            break
        running = [seq.request_id for seq in queue.running]
        for request_id in running:
            left[request_id] -= 1
        step(queue, finish=tuple(request_id for request_id in running if left[request_id] <= 0))
    assert not queue.has_work


def run(**overrides: object) -> dict:
    values = {"workload.requests": 500, **overrides}
    return simulate(load_scenario("adapters", [f"{key}={value}" for key, value in values.items()]), saturated_rps=1.0).summary


def test_few_slots_cost_waiting_and_passing_saves_most_of_it():
    all_resident, passing, blocking = run(**{"adapters.slots": 40}), run(), run(**{"adapters.max_bypasses": 0})
    assert all_resident["ttft_s"]["mean"] < passing["ttft_s"]["mean"] < blocking["ttft_s"]["mean"]
    assert passing["adapters"]["loads"] > all_resident["adapters"]["loads"]


def test_a_slow_link_makes_loads_dear():
    fast, slow = run(), run(**{"adapters.load_bytes_per_s": 1.0e9})
    assert slow["adapters"]["load_s"] > 10 * fast["adapters"]["load_s"]
    assert slow["ttft_s"]["p99"] > fast["ttft_s"]["p99"]


def test_runs_and_single_steps_agree():
    scenario = load_scenario("adapters", ["workload.requests=200"])
    assert simulate(scenario, saturated_rps=1.0).summary["itl_s"] == simulate(scenario, stepwise=True, saturated_rps=1.0).summary["itl_s"]


def test_the_size_of_an_adapter():
    """Rank 16 on the published shape: q, k, v in one matrix and gate, up in one, so one A serves each group."""
    llm = load_llm("llama-3.1-8b")
    expected = 32 * 16 * 2 * ((4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096))
    assert adapter_bytes(llm, 16) == expected


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"adapters": "null"}, "adapters"),
        ({"adapters.policy": "lruu"}, "lru"),
        ({"workload.adapters": "{count: 3, names: [x]}"}, "names or count"),
        ({"adapters.slots": 0}, "slots"),
    ],
)
def test_mistakes_are_named(overrides, match):
    with pytest.raises(InputError, match=match):
        run(**overrides)
