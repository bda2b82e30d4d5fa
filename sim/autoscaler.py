"""Asks an autoscaling policy at intervals how many replicas there should be, and sees to it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from serving.errors import BrokenPolicyError
from serving.policies.protocols import Autoscaling
from serving.scenario.dynamics import Autoscaling as AutoscalingSpec
from serving.scenario.model import Targets
from serving.sequence import Sequence
from sim.dynamics import LOST, READY, STARTING, Fleet
from sim.outcomes import latencies


class State:
    """What an autoscaler sees of a fleet, or of one pool of it (``serving.policies.protocols.FleetState``)."""

    def __init__(self, fleet: Fleet, targets_of: Callable[[str], Targets], role: str | None = None) -> None:
        """``role``: of the pool, in a fleet that has pools."""
        self._fleet = fleet
        self._role = role
        self.among = range(len(fleet.cluster.replicas)) if role is None else fleet.cluster.positions(role)
        self._replicas = {index: fleet.cluster.replicas[index] for index in self.among}
        self._targets_of = targets_of if role is None else lambda name: _of_role(targets_of(name), role)
        self._violations_s: list[float] = []
        self._busy: dict[int, tuple[float, float]] = {}
        self.now_s = 0.0
        fleet.listen(self._note)

    def _note(self, seq: Sequence, now_s: float, status: str) -> None:
        if not latencies(seq, now_s).meet(self._targets_of(seq.request.class_name)):
            self._violations_s.append(now_s)

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return self._fleet.count(READY, among=self.among)

    @property
    def starting(self) -> int:
        """Replicas on their way there."""
        return self._fleet.count(STARTING, LOST, among=self.among)

    @property
    def provisioned(self) -> int:
        """Ready and starting."""
        return self.ready + self.starting

    @property
    def pending(self) -> int:
        """Requests that wait, at the replicas or for one."""
        return self._held()[0] + sum(replica.scheduler.waiting_count for replica in self._replicas.values())

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens of unfinished requests, those included that wait for a replica."""
        here = sum(seq.request.prompt_tokens for replica in self._replicas.values() for seq in replica.scheduler.live())
        return here + self._held()[1]

    def _held(self) -> tuple[int, int]:
        """Requests that no replica has yet, and their prompt tokens."""
        cluster = self._fleet.cluster
        return (cluster.held, cluster.held_tokens) if self._role is None else cluster.held_by(self._role)

    def use(self, signal: str) -> float:
        """Mean use of the ready replicas now (``busy``: since the last time that was asked for, or since each was ready); 1 without any."""
        ready = [index for index in self.among if self._fleet.states[index] == READY]
        if not ready:
            return 1.0
        return sum(self._use_of(index, signal) for index in ready) / len(ready)

    def _use_of(self, index: int, signal: str) -> float:
        replica = self._replicas[index]
        scheduler = replica.scheduler
        if signal == "occupancy":
            return scheduler.running.count / scheduler.policies.limits.max_batch_seqs
        if signal == "kv":
            return 1 - scheduler.pool.free / scheduler.pool.total
        busy_s = replica.busy_until(self.now_s)
        before_s, before_busy_s = max(self._busy.get(index, (0.0, 0.0)), self._fleet.ready_since[index])
        self._busy[index] = (self.now_s, busy_s)
        return (busy_s - before_busy_s) / (self.now_s - before_s) if self.now_s > before_s else 0.0

    def violations(self, window_s: float) -> int:
        """Requests that left within the last ``window_s`` without meeting their objectives."""
        return len(self._violations_s) - bisect_left(self._violations_s, self.now_s - window_s)


def _of_role(targets: Targets, role: str) -> Targets:
    """The objectives that a pool of this role answers for."""
    return Targets(ttft_s=targets.ttft_s) if role == "prefill" else targets._replace(ttft_s=math.inf)


class Autoscaler:
    """Asks the policy every interval, as long as requests arrive or are unfinished."""

    def __init__(self, fleet: Fleet, spec: AutoscalingSpec, policy: Autoscaling, state: State) -> None:
        self._fleet, self._spec, self._policy, self._state = fleet, spec, policy, state
        fleet.recur(spec.interval_s, self._decide)

    def _decide(self) -> None:
        state, now_s = self._state, self._fleet.cluster.env.now
        state.now_s = now_s
        answer = self._policy.target(state)
        if not isinstance(answer, int):
            raise BrokenPolicyError(
                f"autoscaling policy {type(self._policy).__name__} at {now_s:.6f} s: target must be a whole number, got {answer!r}"
            )
        wanted = min(max(answer, self._spec.minimum), self._spec.maximum)
        while state.provisioned < wanted and self._fleet.start(state.among):
            pass
        while state.provisioned > wanted and self._fleet.drain(state.among):
            pass
        self._fleet.recur(now_s + self._spec.interval_s, self._decide)
