"""Clients against a fleet that serves every request in a fixed time."""

from __future__ import annotations

from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clients import Conversations, OpenLoop, Users, start_clients
from serving.request import Arrival, Request
from serving.scenario import from_mapping
from serving.scenario.arrivals import ClosedLoop
from serving.workload import Session, Turn
from sim.environment import STEP_END, Environment


class FixedTimeFleet:
    """Answers each request ``service_s`` after its submission; refuses those in ``refused`` at once."""

    def __init__(self, service_s: float, refused: frozenset[int] = frozenset()) -> None:
        self.env = Environment()
        self.service_s = service_s
        self.refused = refused
        self.submitted: list[tuple[float, Request, int]] = []
        self.answers: list[tuple[int, float]] = []
        self._watchers: list = []

    def on_outcome(self, watcher) -> None:
        self._watchers.append(watcher)

    def submit(self, request: Request, output_tokens: int) -> None:
        assert request.arrival_s == self.env.now
        self.submitted.append((self.env.now, request, output_tokens))
        if request.request_id in self.refused:
            self._tell(request.request_id, "rejected: max_model_len")
            return
        self.env.at(self.env.now + self.service_s, lambda event: self._tell(request.request_id, "stop"), STEP_END)

    def _tell(self, request_id: int, status: str) -> None:
        self.answers.append((request_id, self.env.now))
        for watcher in self._watchers:
            watcher(request_id, self.env.now, status)


def arrival(request_id: int, arrival_s: float = 0.0) -> Arrival:
    return Arrival(Request(request_id, arrival_s, 10, 5), 3)


def single(request_id: int, start_s: float = 0.0) -> Session:
    return Session(start_s, (Turn(arrival(request_id, start_s), 0.0),))


@given(st.lists(st.integers(0, 5), max_size=30))
def test_open_loop_submits_every_request_at_its_own_instant_in_order_of_id(gaps: list[int]) -> None:
    fleet, time_s, arrivals = FixedTimeFleet(7.3), 0.0, []
    for number, gap in enumerate(gaps):
        time_s += gap * 0.1
        arrivals.append(arrival(number, time_s))
    OpenLoop(fleet, iter(arrivals))
    fleet.env.run()
    assert [(now_s, request.request_id) for now_s, request, _ in fleet.submitted] == [(a.request.arrival_s, a.request.request_id) for a in arrivals]


def test_open_loop_draws_requests_only_as_they_are_needed() -> None:
    drawn = []
    OpenLoop(fleet := FixedTimeFleet(1.0), (drawn.append(number) or arrival(number, float(number)) for number in range(100)))
    fleet.env.run(until=3.5)
    assert len(drawn) == 5


def test_turns_follow_the_answer_and_their_gap() -> None:
    fleet = FixedTimeFleet(2.0)
    turns = (Turn(arrival(0), 0.0), Turn(arrival(1), 0.5), Turn(arrival(2), 0.0, not_before_s=9.0), Turn(arrival(3), 0.0, not_before_s=1.0))
    Conversations(fleet, iter([Session(1.0, turns)]))
    fleet.env.run()
    assert [request.arrival_s for _, request, _ in fleet.submitted] == [1.0, 3.5, 10.0, 12.0]


def test_a_refused_turn_ends_its_session_and_no_other() -> None:
    fleet = FixedTimeFleet(2.0, refused=frozenset({1}))
    sessions = [
        Session(0.0, tuple(Turn(arrival(number), 0.0) for number in (0, 1, 2, 3))),
        Session(0.0, (Turn(arrival(4), 0.0), Turn(arrival(5), 0.0))),
    ]
    clients = Conversations(fleet, iter(sessions))
    fleet.env.run()
    assert [request.request_id for _, request, _ in fleet.submitted] == [0, 4, 1, 5]
    assert clients.dropped == 2


def test_closed_loop_keeps_each_user_busy_and_obeys_littles_law() -> None:
    fleet = FixedTimeFleet(2.0)
    Users(fleet, map(single, range(1000)), ClosedLoop(process="closed_loop", users=7), repeat(0.5))
    fleet.env.run()
    assert len(fleet.submitted) == 1000
    # N = X (R + Z): seven users, 2 s of service and 0.5 s of thought.
    throughput_rps = 7 / 2.5
    assert fleet.env.now == pytest.approx(1000 / throughput_rps, abs=2.5)
    open_requests = {now_s: sum(1 for t, _, _ in fleet.submitted if t <= now_s < t + 2.0) for now_s in (0.0, 1.9, 51.0, 100.1)}
    assert set(open_requests.values()) == {7}


def test_closed_loop_ramp_duration_and_retry() -> None:
    fleet = FixedTimeFleet(1.0, refused=frozenset({2}))
    spec = ClosedLoop(process="closed_loop", users=4, ramp_s=2.0, retry_s=10.0)
    Users(fleet, map(single, range(1000)), spec, repeat(0.0), duration_s=8.0)
    fleet.env.run()
    assert [now_s for now_s, _, _ in fleet.submitted][:4] == [0.0, 0.5, 1.0, 1.0]
    assert all(now_s < 8.0 for now_s, _, _ in fleet.submitted)
    assert len(fleet.submitted) == 8 + 8 + 1 + 7  # user 2 was refused at 1.0 and would only come back at 11.0


@settings(max_examples=25, deadline=None)
@given(users=st.integers(1, 5), turns=st.integers(1, 4), requests=st.integers(1, 25), refused=st.frozensets(st.integers(0, 25), max_size=4))
def test_closed_loop_over_sessions_conserves_requests(users: int, turns: int, requests: int, refused: frozenset[int]) -> None:
    workload = {
        "requests": requests,
        "arrivals": {"process": "closed_loop", "users": users, "think_s": {"dist": "exponential", "mean": 2.0}},
        "prompt_tokens": 20,
        "output_tokens": 5,
        "sessions": {"turns": turns, "think_s": 1.0},
    }
    scenario = from_mapping({"name": "s", "llm": "x", "cluster": {"gpu": "y"}, "workload": workload})

    def run() -> tuple:
        fleet = FixedTimeFleet(1.5, refused)
        clients = start_clients(fleet, scenario.workload, seed=5, block_tokens=16, max_model_len=1000, prefix_caching=True)
        fleet.env.run()
        return fleet.submitted, clients.dropped, fleet.answers

    submitted, dropped, answers = run()
    ids = [request.request_id for _, request, _ in submitted]
    assert len(ids) + dropped == requests
    assert len(set(ids)) == len(ids) == len(answers)
    assert run() == (submitted, dropped, answers)


def test_clients_are_chosen_by_workload() -> None:
    def kind(**workload: object) -> type:
        common = {"requests": 3, "prompt_tokens": 5, "output_tokens": 5}
        scenario = from_mapping({"name": "s", "llm": "x", "cluster": {"gpu": "y"}, "workload": {**common, **workload}})
        arguments = {"seed": 1, "block_tokens": 16, "max_model_len": 100, "prefix_caching": True}
        return type(start_clients(FixedTimeFleet(1.0), scenario.workload, **arguments))

    poisson = {"process": "poisson", "rate_rps": 1.0}
    assert kind(arrivals=poisson) is OpenLoop
    assert kind(arrivals=poisson, sessions={"turns": 2}) is Conversations
    assert kind(arrivals={"process": "closed_loop", "users": 2}) is Users
