"""What a replica counts: blocks over time, idle time, gaps between tokens, who left when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drivers import Case, Linear, build, random_aborts, random_arrivals, random_case, request, serve

from serving.request import Arrival
from sim.environment import ARRIVAL, STEP_END, Environment


@pytest.mark.parametrize("seed", range(30))
def test_every_gap_between_tokens_is_counted_once(seed):
    """As many gaps as tokens after the first; together they are as long as from each first token to the last."""
    case = random_case(seed, replicas=1 + seed % 2)
    arrivals = random_arrivals(seed, case)
    served = serve(case, arrivals, aborts=random_aborts(seed, arrivals) if seed % 3 == 0 else [])
    columns, gaps = served.columns, served.metrics.itl_gaps
    assert gaps.count == np.maximum(columns["output_tokens"] - 1, 0).sum()
    done = columns["status_code"] == 0
    if set(columns["status_code"]) <= {0, 1}:  # the last token of one that was cut off came before it left
        total_s = (columns["finish_s"] - columns["first_token_s"])[done].sum()
        assert gaps._total_ns * 1e-9 == pytest.approx(total_s, abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_times_are_in_order_and_tokens_are_all_there(seed, max_in_flight):
    case = replace(random_case(seed), max_in_flight=max_in_flight)
    arrivals = random_arrivals(seed, case)
    columns = serve(case, arrivals).columns
    expected = np.array([min(arrival.output_tokens, arrival.request.max_output_tokens) for arrival in arrivals])
    done = columns["status_code"] == 0
    assert (columns["output_tokens"][done] == expected[done]).all() and (columns["output_tokens"] <= expected).all()
    assert (columns["arrival_s"] <= columns["finish_s"]).all()
    for earlier, later in (("arrival_s", "scheduled_s"), ("scheduled_s", "first_token_s"), ("first_token_s", "finish_s")):
        assert (columns[earlier][done] <= columns[later][done]).all()


def test_blocks_in_use_over_time_by_hand():
    """Prompt 30 and four tokens: pages 2, 2, 2, 3 while entries are 30, 31, 32, 33; each step lasts 0.1 s."""
    case = Case(blocks=11, latency=Linear(0.1, 0.0, 0.0, 0.0))
    served = serve(case, [Arrival(request(0, 1.0, 30), 4)])
    replica = served.cluster.replicas[0]
    assert replica.pages.block_seconds == pytest.approx(0.1 * (2 + 2 + 2 + 3))
    assert replica.pages.max_blocks == 3
    assert served.summary["kv_utilisation"] == {"mean": pytest.approx(0.9 / (10 * 1.4)), "max": 0.3}


def test_idle_time_and_steps():
    case = Case(latency=Linear(0.1, 0.0, 0.0, 0.0))
    served = serve(case, [Arrival(request(0, 1.0), 3), Arrival(request(1, 5.0), 2)])
    replica = served.cluster.replicas[0]
    assert replica.idle_s == pytest.approx(1.0 + 3.7) and replica.scheduler.steps == 5
    assert served.summary["gpu_busy_fraction"] == pytest.approx(0.5 / 5.2)
    assert replica.busy_until(5.2) == pytest.approx(0.5)


def test_an_arrival_in_the_middle_of_a_step_is_seen_by_the_next():
    case = Case(latency=Linear(0.1, 0.0, 0.0, 0.0))
    arrivals = [Arrival(request(0, 0.0), 100), Arrival(request(1, 0.55), 1), Arrival(request(2, 1.2), 1)]
    columns = serve(case, arrivals).columns
    assert columns["scheduled_s"][1] == pytest.approx(0.6)
    assert columns["scheduled_s"][2] == pytest.approx(1.2), "an arrival at a step's end is seen by the step that starts then"


def test_whoever_watches_learns_at_that_instant_and_in_order():
    case = random_case(9, replicas=3)
    seen: list[tuple[float, float]] = []
    env, cluster, _ = build(case)
    cluster.on_outcome(lambda request_id, time_s, status: seen.append((env.now, time_s)))
    for arrival in random_arrivals(9, case):
        env.at(arrival.request.arrival_s, lambda event, arrival=arrival: cluster.submit(arrival.request, arrival.output_tokens), ARRIVAL)
    env.run()
    assert len(seen) == 60
    assert all(now_s == time_s for now_s, time_s in seen)
    assert [time_s for _, time_s in seen] == sorted(time_s for _, time_s in seen)


@pytest.mark.parametrize("audit_share", [0.0, 1.0])
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_client_that_answers_at_once(stepwise, audit_share):
    """A closed loop without thinking: each end, also one at the wall of the pool, is answered with a request at that instant."""
    case = Case(blocks=9, latency=Linear(0.01, 1e-4, 0.0, 0.0))
    env, cluster, metrics = build(case, stepwise=stepwise, audit_share=audit_share)
    sent = []

    def send(now_s: float) -> None:
        if len(sent) < 30:
            request_id = len(sent)
            sent.append(now_s)
            cluster.submit(request(request_id, now_s, 100 if request_id % 3 == 0 else 40), 60 if request_id % 3 == 0 else 5)

    cluster.on_outcome(lambda request_id, time_s, status: send(env.now))
    env.at(0.0, lambda event: send(0.0), ARRIVAL)
    env.run()
    columns = metrics.columns()
    assert len(columns["request_id"]) == 30 and set(columns["status_code"].tolist()) == {0, 2}
    assert columns["arrival_s"][1:].tolist() == columns["finish_s"][:-1].tolist()
    assert (columns["scheduled_s"] == columns["arrival_s"]).all(), "the replica was free"


def test_events_at_one_instant_come_by_priority_and_then_by_call():
    env, seen = Environment(), []
    for name, priority in (("step", STEP_END), ("first", ARRIVAL), ("second", ARRIVAL)):
        env.at(1.0, lambda event, name=name: seen.append(name), priority)
    env.run()
    assert seen == ["first", "second", "step"]
    with pytest.raises(ValueError, match="in the past"):
        env.at(0.5, lambda event: None, ARRIVAL)
