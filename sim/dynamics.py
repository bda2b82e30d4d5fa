"""A fleet that changes while it serves: replicas that start, drain and break, by an autoscaling policy and a list of faults.

Every replica that could ever exist is built at the start; those that are not provisioned take no requests and cost nothing.

    off -> starting (cold start, by stage) -> ready -> draining -> off
                                              ready -> lost -> starting
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serving.policies.protocols import Autoscaling
from serving.request import Request
from serving.scenario.dynamics import Autoscaling as AutoscalingSpec
from serving.scenario.dynamics import Fault, Faults
from serving.scenario.model import Targets
from serving.scheduler import Scheduler
from serving.sequence import Sequence
from sim.cluster import Cluster
from sim.environment import FAULT
from sim.replica import Replica

OFF, STARTING, READY, DRAINING, LOST = "off", "starting", "ready", "draining", "lost"


@dataclass(slots=True)
class Ledger:
    """What happened to the fleet: state changes as (time, replica, state), provisioned seconds, requests retried and failed."""

    changes: list[tuple[float, int, str]] = field(default_factory=list)
    provisioned_s: float = 0.0
    retried: int = 0
    failed: int = 0


class Fleet:
    """The states of a cluster's replicas. ``cold_start_s`` is what a new process takes until it serves."""

    def __init__(self, cluster: Cluster, ready: int, cold_start_s: float, new_scheduler: Callable[[], Scheduler]) -> None:
        self.cluster = cluster
        self.ledger = Ledger()
        self.states = [READY] * ready + [OFF] * (len(cluster.replicas) - ready)
        self._cold_start_s = cold_start_s
        self._new_scheduler = new_scheduler
        self._since_s = [0.0] * len(self.states)
        self._versions = [0] * len(self.states)
        for replica in cluster.replicas[ready:]:
            cluster.set_online(replica.index, False)
        for replica in cluster.replicas:
            replica.on_record = self._record
        self._listeners: list[Callable[[Sequence, float, str], None]] = []
        self._recurring = 0  # events on the queue that only repeat as long as others are there
        cluster.watch()

    def recur(self, at_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` at ``at_s``, unless by then nothing but such actions is left to happen."""

        def act(event: object) -> None:
            self._recurring -= 1
            if len(self.cluster.env._queue) > self._recurring or self.cluster.in_flight:
                action()

        self._recurring += 1
        self.cluster.env.at(at_s, act, FAULT)

    def listen(self, listener: Callable[[Sequence, float, str], None]) -> None:
        """Call ``listener(sequence, time_s, status)`` for every request that leaves a replica."""
        self._listeners.append(listener)

    def _record(self, seq: Sequence, now_s: float, status: str) -> None:
        for listener in self._listeners:
            listener(seq, now_s, status)
        for index, state in enumerate(self.states):
            if state == DRAINING and not self.cluster.replicas[index].scheduler.has_work:
                self._enter(index, OFF)

    def count(self, *states: str) -> int:
        """Replicas in any of ``states``."""
        return sum(state in states for state in self.states)

    def _enter(self, index: int, state: str) -> None:
        now_s = self.cluster.env.now
        if self.states[index] != OFF:
            self.ledger.provisioned_s += now_s - self._since_s[index]
        self._since_s[index] = now_s
        self.states[index] = state
        self._versions[index] += 1
        self.ledger.changes.append((now_s, index, state))
        self.cluster.set_online(index, state == READY)

    def close(self, end_s: float) -> None:
        """End the account of provisioned time at ``end_s``."""
        for index, state in enumerate(self.states):
            if state != OFF:
                self.ledger.provisioned_s += max(0.0, end_s - self._since_s[index])
                self._since_s[index] = end_s

    def start(self) -> bool:
        """Provision one more replica: one that drains goes on, else a new one starts cold. False when none is left."""
        for index, state in enumerate(self.states):
            if state == DRAINING:
                self._enter(index, READY)
                return True
        for index, state in enumerate(self.states):
            if state == OFF:
                self._start(index)
                return True
        return False

    def _start(self, index: int) -> None:
        self._enter(index, STARTING)
        version = self._versions[index]

        def ready(event: object) -> None:
            if self._versions[index] == version:
                self._enter(index, READY)

        env = self.cluster.env
        env.at(env.now + self._cold_start_s, ready, FAULT)

    def drain(self) -> bool:
        """Take the last ready replica out of rotation; it finishes what it holds. A replica that still starts is dropped first."""
        for index in reversed(range(len(self.states))):
            if self.states[index] == STARTING:
                self._enter(index, OFF)
                return True
        for index in reversed(range(len(self.states))):
            if self.states[index] == READY:
                self._enter(index, DRAINING)
                if not self.cluster.replicas[index].scheduler.has_work:
                    self._enter(index, OFF)
                return True
        return False

    def lose(self, index: int, for_s: float) -> list:
        """The replica breaks; after ``for_s`` its process starts again, cold. Returns the requests that it held."""
        if self.states[index] not in (READY, DRAINING):
            return []
        lost = self.cluster.replicas[index].lose(self._new_scheduler(), self.cluster.env.now)
        self._enter(index, LOST)
        version = self._versions[index]

        def restart(event: object) -> None:
            if self._versions[index] == version:
                self._start(index)

        env = self.cluster.env
        env.at(env.now + for_s, restart, FAULT)
        return lost


class State:
    """What an autoscaler sees of a fleet (``serving.policies.protocols.FleetState``)."""

    def __init__(self, fleet: Fleet, targets_of: Callable[[str], Targets]) -> None:
        self._fleet = fleet
        self._targets_of = targets_of
        self._violations: deque[float] = deque()
        self._busy: dict[int, tuple[float, float]] = {}
        self.now_s = 0.0
        fleet.listen(self._note)

    def _note(self, seq: Sequence, now_s: float, status: str) -> None:
        targets = self._targets_of(seq.request.class_name)
        arrival_s, first_s = seq.request.arrival_s, seq.first_token_s
        tpot_s = (now_s - first_s) / (seq.generated - 1) if seq.generated > 1 else 0.0
        met = first_s - arrival_s <= targets.ttft_s and tpot_s <= targets.tpot_s and now_s - arrival_s <= targets.e2e_s
        if not met:
            self._violations.append(now_s)

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return self._fleet.count(READY)

    @property
    def starting(self) -> int:
        """Replicas on their way there."""
        return self._fleet.count(STARTING, LOST)

    @property
    def provisioned(self) -> int:
        """Ready and starting."""
        return self.ready + self.starting

    def _ready(self) -> list[Replica]:
        return [replica for replica, state in zip(self._fleet.cluster.replicas, self._fleet.states) if state == READY]

    @property
    def pending(self) -> int:
        """Requests that wait, at the replicas or for one."""
        return self._fleet.cluster.held + sum(replica.scheduler.waiting_count for replica in self._fleet.cluster.replicas)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens of unfinished requests."""
        return sum(seq.request.prompt_tokens for replica in self._fleet.cluster.replicas for seq in replica.scheduler.live())

    def use(self, signal: str) -> float:
        """Mean use of the ready replicas now (``busy``: since the last time that was asked for)."""
        ready = self._ready()
        if not ready:
            return 1.0
        return sum(self._use_of(replica, signal) for replica in ready) / len(ready)

    def _use_of(self, replica: Replica, signal: str) -> float:
        scheduler = replica.scheduler
        if signal == "occupancy":
            return scheduler.running.count / scheduler.policies.limits.max_batch_seqs
        if signal == "kv":
            return 1 - scheduler.pool.free / scheduler.pool.total
        busy_s = replica.busy_until(self.now_s)
        before_s, before_busy_s = self._busy.get(replica.index, (0.0, 0.0))
        self._busy[replica.index] = (self.now_s, busy_s)
        return (busy_s - before_busy_s) / (self.now_s - before_s) if self.now_s > before_s else 0.0

    def violations(self, window_s: float) -> int:
        """Requests that left within the last ``window_s`` without meeting their objectives."""
        return sum(time_s >= self.now_s - window_s for time_s in self._violations)


class Autoscaler:
    """Asks the policy every interval, as long as requests arrive or are unfinished."""

    def __init__(self, fleet: Fleet, spec: AutoscalingSpec, policy: Autoscaling, state: State) -> None:
        self._fleet, self._spec, self._policy, self._state = fleet, spec, policy, state
        self._env = fleet.cluster.env
        fleet.recur(spec.interval_s, self._decide)

    def _decide(self) -> None:
        state = self._state
        state.now_s = self._env.now
        wanted = min(max(self._policy.target(state), self._spec.minimum), self._spec.maximum)
        while state.provisioned < wanted and self._fleet.start():
            pass
        while state.provisioned > wanted and self._fleet.drain():
            pass
        self._fleet.recur(self._env.now + self._spec.interval_s, self._decide)


class FaultInjector:
    """Breaks things when their time has come. ``degrade(link, factor)`` slows links; None where there are none."""

    def __init__(
        self, fleet: Fleet, faults: Faults, rng: np.random.Generator, degrade: Callable[[str, float], None] | None, fail: Callable[[Request, float], None]
    ) -> None:
        self._fleet, self._faults, self._rng = fleet, faults, rng
        self._degrade, self._fail = degrade, fail
        self._env = fleet.cluster.env
        self._attempts: dict[int, int] = {}
        self.struck: list[tuple[float, Fault]] = []
        for fault in faults.events:
            self._arm(fault, fault.at_s)

    def _arm(self, fault: Fault, at_s: float | None) -> None:
        if at_s is None:
            at_s = self._env.now + float(self._rng.exponential(fault.every_s))
        self._fleet.recur(at_s, lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        cluster, now_s = self._fleet.cluster, self._env.now
        replicas = len(cluster.replicas)
        index = fault.replica if fault.replica is not None else int(self._rng.integers(replicas))
        self.struck.append((now_s, fault))
        if fault.kind == "replica_loss":
            self._reroute(self._fleet.lose(index, fault.for_s))
        elif fault.kind == "host_stall":
            self._touch(index, lambda replica: replica.stall(fault.for_s, now_s))
        elif fault.kind == "slow_gpu":
            self._touch(index, lambda replica: replica.slow_down(fault.factor, now_s))
            self._env.at(now_s + fault.for_s, lambda event: self._touch(index, lambda replica: replica.slow_down(1.0, self._env.now)), FAULT)
        else:
            self._degrade(fault.link, fault.factor)
            self._env.at(now_s + fault.for_s, lambda event: self._degrade(fault.link, 1.0), FAULT)
        if fault.every_s is not None:
            self._arm(fault, None)

    def _touch(self, index: int, change: Callable[[Replica], None]) -> None:
        replica = self._fleet.cluster.replicas[index]
        change(replica)
        self._fleet.cluster.arm(replica)

    def _reroute(self, lost: list) -> None:
        ledger = self._fleet.ledger
        for request, output_tokens in lost:
            attempts = self._attempts.get(request.request_id, 0)
            if self._faults.lost_requests == "retry" and attempts < self._faults.retries:
                self._attempts[request.request_id] = attempts + 1
                ledger.retried += 1
                self._fleet.cluster.resubmit(request, output_tokens)
            else:
                ledger.failed += 1
                self._fail(request, self._env.now)


def recovery_s(struck: list[float], windows: list[tuple[float, int, int]], wanted: float, window_s: float) -> list[float | None]:
    """For each fault, by its time, seconds until a window of arrivals meets the SLO again after one that did not.

    0 if none missed it before the next fault, None if it was not met again before that. ``windows`` are (start, requests,
    requests that met their objectives), in order of time.
    """
    answers: list[float | None] = []
    for at_s, next_s in zip(struck, [*struck[1:], math.inf]):
        seen = [(start, met >= wanted * count) for start, count, met in windows if count and start + window_s > at_s and start < next_s]
        missed = next((position for position, (_, good) in enumerate(seen) if not good), None)
        if missed is None:
            answers.append(0.0)
        else:
            answers.append(next((start - at_s for start, good in seen[missed:] if good), None))
    return answers
