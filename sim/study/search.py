"""Best first: the cheapest fleets of a candidate set, each proved dearer than whatever was refused before it.

Every candidate has a lower bound on its cost, which rises as more is known: one replica; then as many as its saturated
throughput needs; then as many as survive the busiest slice; then one more for every fleet that fails the whole workload. The
candidate with the lowest bound is looked at next, so a fleet that is confirmed is the cheapest of those not yet decided, and the
search ends when enough are. Candidates whose bound is by then above the fleets found are dominated: they were never simulated in
full, and their cost is reported as "at least". Rounds have a fixed size: the result does not depend on how many workers there are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.errors import InputError
from serving.scenario.planning import Plan
from sim.study.candidates import Candidate
from sim.study.executors import PoolInUse
from sim.study.load import Load
from sim.study.points import Points, files_identity, key_of
from sim.study.tasks import OK, REFUSED, Answer, Task, carry_out
from sim.study.verdict import FEASIBLE, OPEN

RATE, SCREEN, CONFIRM = range(3)
FOUND, MISSED, DOMINATED, RULED_OUT, BROKEN = "feasible", "infeasible", "dominated", "refused", "failed"
Entry = tuple[float, int, float, int]  # cost, -stage, -saturated rate of the fleet, index: the order of the queue
_ROUND = 16  # tasks of a round
_CAREFUL = 0.95  # of the replicas that the saturated rate asks for: it is measured on a sample
_FAR = 1.5  # alternatives dearer than this many times the cheapest fleet are not worked out only to be compared


@dataclass(slots=True)
class Fate:
    """What is known of a candidate. ``limit`` says why it is not feasible, ``replicas`` is the lower bound until it is."""

    candidate: Candidate
    status: str = DOMINATED
    replicas: int = 1
    replica_rps: float | None = None
    limit: str = ""
    result: dict[str, Any] | None = None  # of the confirming task
    runs: int = 0  # fleets of it that were simulated, slices included

    @property
    def cost(self) -> float:
        """Dollars per hour of ``replicas``."""
        return self.replicas * self.candidate.usd_per_replica_h


@dataclass(slots=True)
class Search:
    """The state of a best-first search over ``candidates``."""

    plan: Plan
    load: Load
    attainment: float
    fates: list[Fate]
    quotas: Mapping[tuple[str, str], int]
    found: list[Fate] = field(default_factory=list)
    tasks: int = 0

    def labels(self, fate: Fate) -> list[tuple[str, str]]:
        """The groups that this candidate belongs to: all, and one per choice that is compared."""
        config = fate.candidate.config
        return [label for label in self.quotas if not label[0] or str(config.get(label[0])) == label[1]]

    def superfluous(self, fate: Fate, hoped: Sequence[Fate] = ()) -> bool:
        """Whether every group of the candidate has its fleets already, none of them dearer than this one can be.

        ``hoped`` are fleets about to be confirmed, counted as if they were found.
        """
        found = [*self.found, *hoped]
        for label in self.labels(fate):
            if label[0] and found and fate.cost > _FAR * min(each.cost for each in found):
                continue
            cheaper = sum(label in self.labels(each) and each.cost <= fate.cost + 1e-9 for each in found)
            if cheaper < self.quotas[label]:
                return False
        return True


def quotas_for(plan: Plan, candidates: Sequence[Candidate], compared: Sequence[str], top: int) -> dict[tuple[str, str], int]:
    """``top`` fleets over all, and one for every value of what is compared, for the sake of the trade-offs."""
    quotas = {("", ""): top}
    for key in compared:
        for value in dict.fromkeys(str(candidate.config[key]) for candidate in candidates if not candidate.refused):
            quotas[(key, value)] = 1
    return quotas


def run_search(search: Search, use: PoolInUse, store: Points, progress: Callable[[int, int | None], None] | None = None) -> None:
    """Decide what has to be decided; the fates are changed in place. Raises InputError when a task cannot be computed at all."""
    queue: list[Entry] = []
    for index, fate in enumerate(search.fates):
        if fate.candidate.refused:
            fate.status, fate.limit = RULED_OUT, fate.candidate.refused
        else:
            fate.replicas = search.plan.replicas.min
            heapq.heappush(queue, (fate.cost, -RATE, 0.0, index))
    while True:
        entries = _next_round(search, queue)
        if not entries:
            return
        tasks = {index: _task(search, search.fates[index], -stage) for _, stage, _, index in entries}
        answers = carry_out(tasks.values(), use, store)
        search.tasks += len(tasks)
        for _, stage, _, index in entries:
            fate = search.fates[index]
            following = _take(search, fate, -stage, answers[tasks[index].key])
            if following is not None:
                heapq.heappush(queue, (fate.cost, -following, -(fate.replica_rps or 0.0) * fate.replicas, index))
        if progress is not None:
            progress(len(search.fates) - len(queue), len(search.fates))


def _next_round(search: Search, queue: list[Entry]) -> list[Entry]:
    """Take the entries of the next round off the queue. What is superfluous is dropped (and stays dominated); what will be, if
    the fleets to be confirmed in this round hold, waits for the next.
    """
    entries: list[Entry] = []
    waiting: list[Entry] = []
    hoped: list[Fate] = []
    while queue and len(entries) < _ROUND:
        entry = heapq.heappop(queue)
        fate = search.fates[entry[3]]
        if search.superfluous(fate):
            continue
        if search.superfluous(fate, hoped):
            waiting.append(entry)
            continue
        entries.append(entry)
        if -entry[1] == CONFIRM:
            hoped.append(fate)
    for entry in waiting:
        heapq.heappush(queue, entry)
    return entries


def _task(search: Search, fate: Fate, stage: int) -> Task:
    from sim.study import evaluate

    plan, candidate = search.plan, fate.candidate
    function: Callable[..., Any] = (evaluate.replica_rate, evaluate.screen, evaluate.confirm)[stage]
    arguments: tuple = (candidate.scenario,)
    if stage == SCREEN:
        arguments += (fate.replicas, plan.replicas.min, candidate.max_replicas(plan), plan.confidence)
    elif stage == CONFIRM:
        arguments += (fate.replicas, fate.replica_rps, plan.confidence, plan.replications.min, plan.replications.max)
    return Task(key_of(function.__name__, *arguments, files_identity(candidate.scenario)), function, arguments)


def _take(search: Search, fate: Fate, stage: int, answer: Answer) -> int | None:
    """Learn from an answer; return the candidate's next stage, or None when it is decided."""
    if answer.kind != OK:
        fate.status, fate.limit = BROKEN, str(answer.value)
        if answer.kind == REFUSED:
            raise InputError(**answer.value)
        return None
    value, most = answer.value, fate.candidate.max_replicas(search.plan)
    if stage == RATE:
        fate.replica_rps = value["rps"]
        needed = math.ceil(_CAREFUL * search.attainment * search.load.mean_rps / fate.replica_rps) if fate.replica_rps else 1
        fate.replicas = max(fate.replicas, needed)
        if fate.replicas > most:
            return _missed(fate, _limit_of(search, most), f"{search.load.mean_rps:.3g} requests/s need {needed} replicas that serve {fate.replica_rps:.3g} each")
        return SCREEN
    if stage == SCREEN:
        fate.runs += value["runs"]
        if value["replicas"] is None:
            return _missed(fate, "slo", f"{value['why']} with {most} replicas in the busiest minutes")
        fate.replicas = value["replicas"]
        return CONFIRM
    fate.runs += value["replications"]
    if value["verdict"] == FEASIBLE:
        fate.status, fate.result, fate.limit = FOUND, value, ""
        search.found.append(fate)
        return None
    unsure = f"{value['replications']} replications do not show it at {search.plan.confidence:.0%}"
    fate.limit = f"confidence: {unsure}" if value["verdict"] == OPEN else f"slo: {value['why']}"
    if fate.replicas + 1 > most:
        return _missed(fate, *fate.limit.split(": ", 1))
    fate.replicas += 1
    return CONFIRM


def _missed(fate: Fate, limit: str, reason: str) -> None:
    fate.status, fate.limit = MISSED, f"{limit}: {reason}"


def _limit_of(search: Search, most: int) -> str:
    return "replicas" if most == search.plan.replicas.max else "budget"


def run_screens(search: Search, use: PoolInUse, store: Points) -> list[Fate]:
    """Find each candidate's lower bound by the busiest slice, and no more; what fails gets its ``limit``."""
    open_fates = [fate for fate in search.fates if not fate.candidate.refused]
    for fate in search.fates:
        if fate.candidate.refused:
            fate.status, fate.limit = RULED_OUT, fate.candidate.refused
        else:
            fate.replicas = search.plan.replicas.min
    for stage in (RATE, SCREEN):
        tasks = [_task(search, fate, stage) for fate in open_fates]
        answers = carry_out(tasks, use, store)
        open_fates = [fate for fate, task in zip(open_fates, tasks) if _take(search, fate, stage, answers[task.key]) is not None]
    return search.fates
