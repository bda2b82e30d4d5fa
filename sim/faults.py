"""Breaks things by a list of faults, finds new homes for the requests that are lost, and tells when the objectives were met again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from serving.request import Arrival, Request
from serving.scenario.dynamics import Fault, Faults
from sim.dynamics import DRAINING, READY, Fleet
from sim.network import Network
from sim.replica import Replica


class Strike(NamedTuple):
    """A fault that struck, and whom: the position of a replica in the fleet, or -1 for links."""

    at_s: float
    fault: Fault
    replica: int


class FaultInjector:
    """Strikes when a fault's time has come. ``network`` has the links that faults may name; ``fail`` records a request as failed."""

    def __init__(
        self, fleet: Fleet, faults: Faults, rng: np.random.Generator, network: Network | None, fail: Callable[[Request, float], None]
    ) -> None:
        self._fleet, self._faults, self._rng = fleet, faults, rng
        self._network, self._fail = network, fail
        self._attempts: dict[int, int] = {}
        self._slowed: dict[int | str, list[float]] = {}  # factors that slow a replica or the links of a name now
        self._stalled_until_s: dict[int, float] = {}
        self.struck: list[Strike] = []
        for fault in faults.events:
            self._arm(fault, fault.at_s)

    def _arm(self, fault: Fault, at_s: float | None) -> None:
        if at_s is None:
            at_s = self._fleet.cluster.env.now + float(self._rng.exponential(fault.every_s))
        self._fleet.recur(at_s, lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        """Faults at random find one of the replicas in service; with none there, nothing breaks."""
        now_s = self._fleet.cluster.env.now
        index = -1 if fault.kind == "slow_link" else self._target(fault)
        if index is not None:
            self.struck.append(Strike(now_s, fault, index))
            if fault.kind == "replica_loss":
                self._reroute(self._fleet.lose(index, fault.for_s))
            elif fault.kind == "host_stall":
                self._stall(index, now_s, now_s + fault.for_s)
            else:
                self._slow(fault, fault.link if fault.kind == "slow_link" else index)
        if fault.every_s is not None:
            self._arm(fault, None)

    def _target(self, fault: Fault) -> int | None:
        if fault.replica is not None:
            return fault.replica
        serving = [index for index, state in enumerate(self._fleet.states) if state in (READY, DRAINING)]
        return serving[int(self._rng.integers(len(serving)))] if serving else None

    def _stall(self, index: int, now_s: float, until_s: float) -> None:
        """A stall that begins during another adds what it lasts beyond it."""
        from_s = max(now_s, self._stalled_until_s.get(index, now_s))
        if until_s > from_s:
            self._stalled_until_s[index] = until_s
            self._touch(index, lambda replica: replica.stall(until_s - from_s, now_s))

    def _slow(self, fault: Fault, target: int | str) -> None:
        """Of faults that overlap the worst counts; each ends for itself."""
        factors = self._slowed.setdefault(target, [])

        def end() -> None:
            factors.remove(fault.factor)
            self._set_speed(target, factors)

        factors.append(fault.factor)
        self._set_speed(target, factors)
        self._fleet.at(self._fleet.cluster.env.now + fault.for_s, end)

    def _set_speed(self, target: int | str, factors: list[float]) -> None:
        if isinstance(target, str):
            self._network.set_link_factor(target, min(factors, default=1.0))
        else:
            self._touch(target, lambda replica: replica.slow_down(max(factors, default=1.0), self._fleet.cluster.env.now))

    def _touch(self, index: int, change: Callable[[Replica], None]) -> None:
        cluster = self._fleet.cluster
        cluster.settle_signals()
        change(cluster.replicas[index])
        cluster.arm(cluster.replicas[index])

    def _reroute(self, lost: list[Arrival]) -> None:
        ledger, cluster = self._fleet.ledger, self._fleet.cluster
        for request, output_tokens in lost:
            attempts = self._attempts.get(request.request_id, 0)
            if self._faults.lost_requests == "retry" and attempts < self._faults.retries:
                self._attempts[request.request_id] = attempts + 1
                ledger.retried += 1
                cluster.resubmit(request, output_tokens)
            else:
                ledger.failed += 1
                self._fail(request, cluster.env.now)
                cluster.fail(request.request_id)


def recovery_s(struck: list[float], windows: list[tuple[float, int, int]], wanted: float, window_s: float) -> list[float | None]:
    """For each fault, by its time, seconds until a window of arrivals meets the SLO again after one that did not.

    0 if none missed it before the next (later) fault, None if it was not met again before that. ``windows`` are (start, requests,
    requests that met their objectives), in order of time; one without requests says nothing.
    """
    answers: list[float | None] = []
    for at_s in struck:
        next_s = min((other_s for other_s in struck if other_s > at_s), default=math.inf)
        seen = [(start, met >= wanted * count) for start, count, met in windows if count and start + window_s > at_s and start < next_s]
        missed = next((position for position, (_, good) in enumerate(seen) if not good), None)
        if missed is None:
            answers.append(0.0)
        else:
            answers.append(next((start - at_s for start, good in seen[missed:] if good), None))
    return answers
