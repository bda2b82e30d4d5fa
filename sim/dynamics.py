"""The states of a fleet's replicas: they start, drain and break while it serves.

Every replica that could ever exist is built at the start; those that are not provisioned take no requests and cost nothing.

    off -> starting (cold start, by stage) -> ready -> draining -> off
                                    starting, ready -> lost -> starting
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from serving.request import Arrival
from serving.scheduler import Scheduler
from serving.sequence import Sequence
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.environment import FAULT

OFF, STARTING, READY, DRAINING, LOST = "off", "starting", "ready", "draining", "lost"


@dataclass(slots=True)
class Ledger:
    """What happened to the fleet: state changes as (time, replica, state), requests retried and failed."""

    changes: list[tuple[float, int, str]] = field(default_factory=list)
    retried: int = 0
    failed: int = 0


class Fleet:
    """The states of a cluster's replicas, by their position in it.

    ``ready``: those that serve at the start, the first so many or by position. ``cold_start_s(index)`` is what a new process takes until it serves, ``new_scheduler(index)`` what it begins with.
    """

    def __init__(
        self, cluster: Cluster | Disaggregated, ready: int | Collection[int], cold_start_s: Callable[[int], float], new_scheduler: Callable[[int], Scheduler]
    ) -> None:
        self.cluster = cluster
        self.ledger = Ledger()
        self._everybody = range(len(cluster.replicas))
        at_first = range(ready) if isinstance(ready, int) else ready
        self.states = [READY if index in at_first else OFF for index in self._everybody]
        self.ready_since = [(0.0, 0.0)] * len(self.states)  # when each replica last became ready, and its busy seconds by then
        self._replicas = cluster.replicas
        self._initial = tuple(self.states)
        self._cold_start_s = cold_start_s
        self._new_scheduler = new_scheduler
        self._versions = [0] * len(self.states)
        self._listeners: list[Callable[[Sequence, float, str], None]] = []
        self.forever = False  # whether requests may always still come
        self._own = 0  # events on the queue that are the fleet's: they alone keep nothing going
        for index, replica in enumerate(self._replicas):
            replica.on_record = self._recorder(index)
            if self.states[index] == OFF:
                cluster.set_online(index, False)
        if isinstance(cluster, Disaggregated):
            cluster.on_released = self._emptied
        cluster.watch()

    # -- events ---------------------------------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` at ``time_s``, before whatever else happens then."""

        def act(event: object) -> None:
            self._own -= 1
            action()

        self._own += 1
        self.cluster.env.at(time_s, act, FAULT)

    def recur(self, time_s: float, action: Callable[[], None]) -> None:
        """As ``at``, unless by then no request is here and nothing but the fleet's own events is to come: then there is no end to it."""
        self.at(time_s, lambda: action() if self.forever or self.cluster.in_flight or len(self.cluster.env._queue) > self._own else None)

    def listen(self, listener: Callable[[Sequence, float, str], None]) -> None:
        """Call ``listener(sequence, time_s, status)`` for every request that leaves a replica."""
        self._listeners.append(listener)

    def _recorder(self, index: int) -> Callable[[Sequence, float, str], None]:
        def record(seq: Sequence, now_s: float, status: str) -> None:
            for listener in self._listeners:
                listener(seq, now_s, status)
            self._emptied(index)

        return record

    def _emptied(self, index: int) -> None:
        """Something has left a replica; one that drains is off with the last of it."""
        if self.states[index] == DRAINING and not self._holds(index):
            self._enter(index, OFF)

    def _holds(self, index: int) -> bool:
        """Whether requests are there, with a seat or without, or are bound to come."""
        scheduler = self._replicas[index].scheduler
        return scheduler.has_work or scheduler.landing.parked > 0 or (isinstance(self.cluster, Disaggregated) and self.cluster.awaited(index))

    # -- states ---------------------------------------------------------------------------------------------------------

    def count(self, *states: str, among: range | None = None) -> int:
        """Replicas in any of ``states``, of those at the positions ``among``, or of all."""
        return sum(self.states[index] in states for index in among or self._everybody)

    def _enter(self, index: int, state: str) -> None:
        now_s = self.cluster.env.now
        self.states[index] = state
        self._versions[index] += 1
        self.ledger.changes.append((now_s, index, state))
        if state == READY:
            self.ready_since[index] = (now_s, self._replicas[index].busy_until(now_s))
        self.cluster.set_online(index, state == READY)

    def _unless_changed(self, index: int, delay_s: float, action: Callable[[int], None]) -> None:
        """Call ``action(index)`` after ``delay_s`` if the replica is still in its present state by then."""
        version = self._versions[index]
        self.at(self.cluster.env.now + delay_s, lambda: action(index) if self._versions[index] == version else None)

    def start(self, among: range | None = None) -> bool:
        """Provision one more replica: one that drains goes on, else a new one starts cold. False when none is left."""
        for index in among or self._everybody:
            if self.states[index] == DRAINING:
                self._enter(index, READY)
                return True
        for index in among or self._everybody:
            if self.states[index] == OFF:
                self._start(index)
                return True
        return False

    def _start(self, index: int) -> None:
        self._enter(index, STARTING)
        self._unless_changed(index, self._cold_start_s(index), lambda index: self._enter(index, READY))

    def drain(self, among: range | None = None) -> bool:
        """Give one replica back: the last that takes no requests yet (it starts, or is lost), else the last ready one finishes what
        it holds. False when none is left.
        """
        for wanted in (STARTING, LOST, READY):
            for index in reversed(among or self._everybody):
                if self.states[index] == wanted:
                    self._enter(index, DRAINING if wanted == READY else OFF)
                    self._emptied(index)
                    return True
        return False

    def lose(self, index: int, for_s: float) -> list[Arrival]:
        """The replica breaks; after ``for_s`` its process starts again, cold (not so one that was draining). Returns the requests
        that it held.
        """
        was = self.states[index]
        if was not in (STARTING, READY, DRAINING):
            return []
        lost = self.cluster.lose(index, self._new_scheduler(index))
        self._enter(index, OFF if was == DRAINING else LOST)
        if was != DRAINING:
            self._unless_changed(index, for_s, self._start)
        return lost

    # -- accounts -------------------------------------------------------------------------------------------------------

    def provisioned_s(self, end_s: float, among: range | None = None) -> float:
        """Seconds of replicas that were not off, from time zero to ``end_s``."""
        total_s = 0.0
        among = among or self._everybody
        since: list[float | None] = [None if state == OFF or index not in among else 0.0 for index, state in enumerate(self._initial)]
        for at_s, index, state in self.ledger.changes:
            if index not in among:
                continue
            before_s = since[index]
            if state == OFF and before_s is not None:
                total_s += max(0.0, min(at_s, end_s) - before_s)
            if state == OFF or before_s is None:
                since[index] = None if state == OFF else at_s
        return total_s + sum(max(0.0, end_s - before_s) for before_s in since if before_s is not None)
