"""Clients: they hand requests to a cluster, at given instants or in answer to what came back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, Protocol

from serving.instants import ARRIVAL
from serving.request import Arrival, Request
from serving.rng import stream
from serving.scenario.arrivals import ClosedLoop
from serving.scenario.workload import Workload
from serving.workload import Session, Turn, conversations, follows_answers, open_arrivals
from serving.workload.lengths import one_by_one, seconds

ANSWERED = ("stop", "length")


class Timeline(Protocol):
    """What a client needs of a clock, simulated or real."""

    @property
    def now(self) -> float:
        """The present, seconds."""

    def at(self, time_s: float, callback: Callable[[Any], None], priority: int) -> Any:
        """Call ``callback`` at ``time_s``, after events of smaller ``priority`` and earlier calls at that time."""


class Fleet(Protocol):
    """What a client needs of a cluster, or of an engine."""

    env: Timeline

    def submit(self, request: Request, output_tokens: int) -> Any:
        """Route a request now."""

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves, at that time and in order of time."""


def start_clients(fleet: Fleet, workload: Workload, **arguments: Any) -> OpenLoop | Conversations | Users:
    """Attach the clients that ``workload`` asks for; they act once the environment runs.

    ``arguments`` are those of ``serving.workload.open_arrivals``. Raises InputError as it does, before anything is submitted.
    """
    if not follows_answers(workload, arguments.get("trace")):
        return OpenLoop(fleet, open_arrivals(workload, **arguments))
    sessions = conversations(workload, **arguments)
    if workload.closed_loop is None:
        return Conversations(fleet, sessions)
    think_s = one_by_one(seconds(workload.closed_loop.think_s, stream(arguments["seed"], "workload.user_think")))
    return Users(fleet, sessions, workload.closed_loop, think_s, workload.duration_s)


class OpenLoop:
    """Submits requests at their arrival times, whatever happens to those before. One event is pending at any time."""

    def __init__(self, fleet: Fleet, arrivals: Iterator[Arrival]) -> None:
        self._env = fleet.env
        self._submit = fleet.submit
        self._arrivals = arrivals
        self._next = next(arrivals, None)
        if self._next is not None:
            self._env.at(self._next.request.arrival_s, self._arrive, ARRIVAL)

    def _arrive(self, event: object) -> None:
        """Submit all requests of this instant, in order of id, and wait for the next."""
        submit, arrivals, now_s = self._submit, self._arrivals, self._env.now
        request, output_tokens = self._next
        while True:
            submit(request, output_tokens)
            self._next = next(arrivals, None)
            if self._next is None:
                return
            request, output_tokens = self._next
            if request.arrival_s > now_s:
                break
        self._env.at(request.arrival_s, self._arrive, ARRIVAL)


class _Progress:
    """How far a session has come."""

    __slots__ = ("position", "start_s", "turns")

    def __init__(self, turns: tuple[Turn, ...], start_s: float) -> None:
        self.turns = turns
        self.start_s = start_s
        self.position = 0


class Turns:
    """Submits the turns of sessions, each after the answer to the one before; ``ended(time_s, answered)`` follows the last.

    A turn that is refused or fails ends its session: its successors would quote an answer that nobody gave.
    """

    def __init__(self, fleet: Fleet, ended: Callable[[float, bool], None]) -> None:
        self.dropped = 0
        self._env = fleet.env
        self._submit = fleet.submit
        self._ended = ended
        self._due: list[tuple[float, int, _Progress]] = []
        self._unanswered: dict[int, _Progress] = {}
        fleet.on_outcome(self._outcome)

    def begin(self, session: Session, start_s: float) -> None:
        """Submit the first turn of ``session`` at ``start_s``, which is not in the past."""
        self._schedule(start_s, _Progress(session.turns, start_s))

    def _schedule(self, time_s: float, progress: _Progress) -> None:
        request_id = progress.turns[progress.position].arrival.request.request_id
        heappush(self._due, (time_s, request_id, progress))
        self._env.at(time_s, self._submit_due, ARRIVAL)

    def _submit_due(self, event: object) -> None:
        """Submit what is due by now in order of (time, id), so that the order in which answers came in decides nothing."""
        due, now_s = self._due, self._env.now
        while due and due[0][0] <= now_s:
            time_s, request_id, progress = heappop(due)
            turn = progress.turns[progress.position]
            request, output_tokens = turn.arrival
            self._unanswered[request_id] = progress  # before submitting: a refusal is told at once
            arrival_s = progress.start_s if turn.from_start else time_s
            self._submit(tuple.__new__(Request, (request_id, arrival_s, *request[2:])), output_tokens)

    def _outcome(self, request_id: int, time_s: float, status: str) -> None:
        progress = self._unanswered.pop(request_id, None)
        if progress is None:
            return
        progress.position += 1
        answered = status in ANSWERED
        left = len(progress.turns) - progress.position
        if answered and left:
            turn = progress.turns[progress.position]
            self._schedule(max(time_s + turn.gap_s, progress.start_s + turn.not_before_s), progress)
        else:
            self.dropped += left
            self._ended(time_s, answered)


class Conversations:
    """Sessions that start at given times, each independent of the others."""

    def __init__(self, fleet: Fleet, sessions: Iterator[Session]) -> None:
        self._env = fleet.env
        self._sessions = sessions
        self._turns = Turns(fleet, lambda time_s, answered: None)
        self._next = next(sessions, None)
        if self._next is not None:
            self._env.at(self._next.start_s, self._begin, ARRIVAL)

    @property
    def dropped(self) -> int:
        """Turns that were never submitted, because one before them was refused or failed."""
        return self._turns.dropped

    def _begin(self, event: object) -> None:
        now_s = self._env.now
        while self._next is not None and self._next.start_s <= now_s:
            self._turns.begin(self._next, now_s)
            self._next = next(self._sessions, None)
        if self._next is not None:
            self._env.at(self._next.start_s, self._begin, ARRIVAL)


class Users:
    """A closed loop: each user holds one session after the other, a think time apart, until sessions or time run out."""

    def __init__(
        self, fleet: Fleet, sessions: Iterator[Session], spec: ClosedLoop, think_s: Iterator[float], duration_s: float | None = None
    ) -> None:
        self._sessions = sessions
        self._think_s = think_s
        self._retry_s = spec.retry_s
        self._until_s = float("inf") if duration_s is None else duration_s
        self._turns = Turns(fleet, self._ended)
        for user in range(spec.users):
            self._begin(spec.ramp_s * user / spec.users)

    @property
    def dropped(self) -> int:
        """Turns that were never submitted, because one before them was refused or failed."""
        return self._turns.dropped

    def _begin(self, start_s: float) -> None:
        session = next(self._sessions, None) if start_s < self._until_s else None
        if session is not None:
            self._turns.begin(session, start_s)

    def _ended(self, time_s: float, answered: bool) -> None:
        think_s = next(self._think_s)
        self._begin(time_s + (think_s if answered else max(think_s, self._retry_s)))
