"""Looks over a scheduler's shoulder: every plan is held to the rules of the seam while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving.plan import BatchPlan
from serving.policies import Policies
from serving.scheduler import Scheduler
from serving.sequence import ENDED, WAITING, Sequence
from sim.cluster import Cluster
from validate.regress.drive import BrokenRuleError, Fault

PASSES = 100  # how many later requests may be admitted before one, where the ordering policy states no number of its own
_EMPTY_PLANS = 10_000  # in a row: whoever asks that often without doing anything never will
_SLOWNESS = 4  # times the steps that serving one request after the other would take


@dataclass(slots=True)
class Seen:
    """What happened to one request. Steps count on its replica; -1 and NaN: never."""

    seen_step: int
    arrival_s: float
    admitted_step: int = -1
    admitted_s: float = math.nan
    passes: int = 0
    status: str = ""
    left_step: int = -1
    left_s: float = math.nan


class Watch:
    """Attach it to a fleet before it starts. Raises BrokenRuleError at the first plan that breaks a rule.

    ``serial_steps`` are the steps of serving one request after the other: many times more is a livelock.
    """

    def __init__(self, serial_steps: int) -> None:
        self.requests: dict[int, Seen] = {}
        self.statuses: dict[int, str] = {}
        self.policies: Policies | None = None
        self.preemptions = 0
        self._most_steps = 100 + _SLOWNESS * serial_steps
        self._fleet: Any = None

    def attach(self, fleet: Cluster) -> None:
        """Stand between every replica and its scheduler."""
        self._fleet = fleet
        fleet.on_outcome(self._left)
        for replica in fleet.replicas:
            scheduler = replica.scheduler
            self.policies = scheduler.policies
            watched = _Watched(self, scheduler, self._most_steps)
            scheduler.schedule = watched.schedule
            scheduler._builder.victim = _Victims(watched, scheduler._builder.victim)

    @property
    def steps(self) -> int:
        """Of all replicas."""
        return sum(replica.scheduler.steps for replica in self._fleet.replicas)

    def finish(self, requests: int) -> None:
        """The run has ended: everybody must have left, and given everything back."""
        for replica in self._fleet.replicas:
            scheduler = replica.scheduler
            left = scheduler.waiting_count + scheduler.running.count
            if left:
                raise BrokenRuleError(Fault(scheduler.steps, "must leave no work undone", f"{left} requests wait or run when nothing happens any more"))
            _check(scheduler)
            if scheduler.pool.free != scheduler.pool.total:
                held = scheduler.pool.total - scheduler.pool.free
                raise BrokenRuleError(Fault(scheduler.steps, "must leak no KV blocks", f"{held} blocks are still held when all requests have left"))
        if len(self.statuses) != requests:
            raise BrokenRuleError(Fault(None, "must lose no request", f"{requests} arrived, {len(self.statuses)} left"))

    def _left(self, request_id: int, time_s: float, status: str) -> None:
        self.statuses[request_id] = status
        seen = self.requests.get(request_id)
        if seen is not None:
            seen.status, seen.left_s, seen.left_step = status, time_s, self.steps


class _Watched:
    """One replica's scheduler."""

    def __init__(self, watch: Watch, scheduler: Scheduler, most_steps: int) -> None:
        self.watch = watch
        self.scheduler = scheduler
        self.evicted_for: list[Sequence] = []
        self._schedule: Callable[[float], BatchPlan] = scheduler.schedule
        self._most_steps = most_steps
        self._empty = 0
        self._queued: dict[int, Seen] = {}
        self._passes = _stated_passes(scheduler.policies)

    def schedule(self, now_s: float) -> BatchPlan:
        """Plan as before, then look at the plan."""
        scheduler = self.scheduler
        for request_id, seq in scheduler._live.items():
            if request_id not in self.watch.requests and seq.state == WAITING:
                self._meet(seq)
        self.evicted_for.clear()
        clock, step = scheduler.clock, scheduler.steps
        plan = self._schedule(now_s)
        self._legal(plan, step, clock)
        for seq in plan.admitted:
            self._admitted(seq, plan)
        self.watch.preemptions += len(plan.preempted)
        self._empty = self._empty + 1 if plan.empty else 0
        if self._empty > _EMPTY_PLANS:
            self.broken(step, "must not livelock", f"{_EMPTY_PLANS:,} empty plans in a row with requests queued")
        if scheduler.steps > self._most_steps:
            self.broken(step, "must not livelock", f"{step:,} steps, {_SLOWNESS} times what serving one request after the other takes")
        return plan

    def broken(self, step: int, rule: str, detail: str) -> None:
        """Stop here."""
        raise BrokenRuleError(Fault(step, rule, detail))

    def _meet(self, seq: Sequence) -> None:
        request = seq.request
        self.watch.requests[request.request_id] = self._queued[request.request_id] = Seen(self.scheduler.steps, request.arrival_s)

    def _legal(self, plan: BatchPlan, step: int, clock: int) -> None:
        scheduler, limits = self.scheduler, self.scheduler.policies.limits
        tokens = sum(new for new, _ in plan.chunks) + (0 if scheduler._builder.whole_prompts else plan.decodes)
        longest = max((new for new, _ in plan.chunks), default=0)
        chosen = [seq.request_id for seq in plan.prefills]
        gone = [seq.request_id for seq in plan.prefills if seq.state in (WAITING, ENDED)]
        waiting = [seq.request_id for seq in self.evicted_for if seq.request_id not in chosen]
        rules = (
            (tokens > limits.max_batch_tokens, "must stay within max_batch_tokens", f"{tokens} of {limits.max_batch_tokens}"),
            (longest > (limits.max_chunk_tokens or tokens), "must stay within max_chunk_tokens", f"{longest} of {limits.max_chunk_tokens}"),
            (scheduler.running.count > limits.max_batch_seqs, "must stay within max_batch_seqs", f"{scheduler.running.count} of {limits.max_batch_seqs}"),
            (len(set(chosen)) < len(chosen), "may give a sequence one chunk a step", f"requests {chosen}"),
            (bool(gone), "must not evict what this very plan computes", f"requests {gone}"),
            (scheduler.clock - clock > 1, "may continue the decodes once a step", ""),
            (bool(waiting), "takes a victim only if the newcomer then fits", f"request {waiting[:1]} made others give way and was not admitted"),
        )  # fmt: skip
        for wrong, rule, detail in rules:
            if wrong:
                self.broken(step, rule, detail)
        _check(scheduler, step)

    def _admitted(self, seq: Sequence, plan: BatchPlan) -> None:
        mine = self._queued.pop(seq.request_id, None)
        if mine is None:
            return  # it had been admitted before and was preempted
        mine.admitted_step, mine.admitted_s = plan.step, plan.now_s
        for request_id, other in self._queued.items():
            if other.arrival_s >= mine.arrival_s:
                break  # those that follow arrived later still
            other.passes += 1
            if other.passes > self._passes:
                self.broken(plan.step, "must not starve", f"request {request_id} was passed by more than {self._passes} that arrived after it")


def _stated_passes(policies: Policies) -> int:
    """How many later requests may be admitted before one: what the ordering policy states, and what a batching policy that reorders adds."""
    ordering = getattr(policies.ordering, "max_passes", PASSES)
    reorders = getattr(policies.batching, "head_of_line", "skip") != "block"
    return ordering + (getattr(policies.batching, "max_bypasses", 0) if reorders else 0)


class _Victims:
    """Stands before the preemption policy and holds it to its contract."""

    def __init__(self, watched: _Watched, policy: Any) -> None:
        self._watched = watched
        self._policy = policy

    def choose(self, running: Any, beneficiary: Sequence | None) -> Sequence | None:
        """The policy's victim."""
        step = self._watched.scheduler.steps
        victim = self._policy.choose(running, beneficiary)
        if victim is None:
            return None
        if victim not in list(running):
            self._watched.broken(step, "a victim must be running", f"chose {victim!r}")
        if beneficiary is not None:
            theirs, ours = victim.request.priority, beneficiary.request.priority
            if theirs <= ours:
                who = f"request {victim.request_id} of priority {theirs} for request {beneficiary.request_id} of priority {ours}"
                self._watched.broken(step, "a victim must be strictly less urgent than the newcomer", who)
            if not self._watched.evicted_for or self._watched.evicted_for[-1] is not beneficiary:
                self._watched.evicted_for.append(beneficiary)
        return victim


def _check(scheduler: Scheduler, step: int | None = None) -> None:
    """The aggregate, the queues and the pool must agree with the sequences."""
    try:
        scheduler.check()
    except (AssertionError, KeyError) as error:
        pool = scheduler.pool
        words = f"the pool says {pool.free} of {pool.total} blocks are free, the sequences say otherwise" if not str(error) else str(error)
        raise BrokenRuleError(Fault(scheduler.steps if step is None else step, "must leak no KV blocks", words)) from None
