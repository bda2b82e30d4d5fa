"""Decision parity: from the instants that an engine recorded, a fresh scheduler makes the same decisions, plan by plan.

What is taken from the record is what the world did: when requests came and were aborted, when steps ended, who ended with them. What
is checked is what the scheduler did: every plan's chunks, preemptions, decodes and blocks, what was refused, and what was not planned
while the engine idled. The scheduler is built from the run's own scenario on a pool without block names: the simulator's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from serving.catalog import load_gpu, load_llm
from serving.errors import BrokenPolicyError, InputError
from serving.kv_pool import KVPool
from serving.kv_tiers import LowerTiers, build_tiers
from serving.layer_reuse import reusing
from serving.plan import BatchPlan, StepResult
from serving.policies.build import policies_of
from serving.records import Run, open_run
from serving.request import Request
from serving.scenario import Scenario, from_mapping
from serving.scheduler import Scheduler
from serving.sequence import Sequence
from serving.workload import Session, conversations, follows_answers, open_arrivals

SUBMIT, ABORT, REFUSE = "submitted", "aborted", "rejected"
CHECKED = ("step", "chunks", "preempted", "decode_seqs", "decode_context_tokens", "kv_blocks_used")


class Event(NamedTuple):
    """Something the scheduler was told between plans."""

    time_s: float
    kind: str
    request_id: int


class Row(NamedTuple):
    """One recorded plan. ``decided`` holds what is compared, by name; a value that was not recorded is None."""

    schedule_s: float
    commit_s: float
    events: list[Event]
    events_before_commits: list[int] | None
    finished: list[int]
    accepted: list[int]
    decided: dict[str, Any]


@dataclass(slots=True)
class Parity:
    """``first_difference`` names the plan (``step``), the ``field``, and its value in the ``engine`` and in the ``replay``."""

    plans: int = 0
    differing_plans: int = 0
    first_difference: dict[str, Any] | None = None

    def differs(self, step: int, what: str, engine: Any, replay: Any) -> None:
        """Note a difference."""
        self.differing_plans += 1
        if self.first_difference is None:
            self.first_difference = {"step": step, "field": what, "engine": engine, "replay": replay}


@dataclass(slots=True)
class Recorded:
    """A run as parity reads it."""

    scenario: Scenario
    rows: list[Row]
    requests: dict[int, Request]
    status: dict[int, str]
    output_tokens: dict[int, int]
    follows_answers: bool = False  # requests may come in answer to what finishes
    later: list[Event] = field(default_factory=list)  # refusals after the last plan


class _OutOfStepError(Exception):
    """The replay can no longer follow the record."""


def parity(folder: Path) -> Parity:
    """Replay the run in ``folder``. Raises InputError when it is not a run that recorded its plans."""
    return replay(read(open_run(folder)))


def replay(recorded: Recorded) -> Parity:
    """Drive a fresh scheduler through the recorded instants and compare its plans."""
    result = Parity(plans=len(recorded.rows))
    following = _Replay(recorded, result)
    try:
        following.run()
    except (_OutOfStepError, BrokenPolicyError, RuntimeError, AssertionError, LookupError) as error:
        step = following.next_row
        if result.first_difference is None:
            result.first_difference = {"step": step, "field": "state", "engine": None, "replay": f"{type(error).__name__}: {error}"}
        result.differing_plans += max(1, len(recorded.rows) - step)
    return result


def _tiers(scenario: Scenario) -> LowerTiers | None:
    """The engine's lower KV tiers: in pages of the scenario's KV dtype, whatever the device computes in."""
    cache = scenario.kv_cache
    if not cache.tiers:
        return None
    return build_tiers(cache, load_gpu(scenario.cluster.gpu), reusing(load_llm(scenario.llm), cache.layer_reuse).kv_bytes_per_token("bf16" if cache.dtype == "auto" else cache.dtype))


class _Replay:
    """The scheduler's side of the record."""

    def __init__(self, recorded: Recorded, result: Parity) -> None:
        cache, batching = recorded.scenario.kv_cache, recorded.scenario.policy.batching
        pool = KVPool(cache.blocks, cache.block_tokens, prefix_caching=cache.prefix_caching, lower=_tiers(recorded.scenario))
        self.scheduler = Scheduler(pool, policies_of(recorded.scenario), max_in_flight=batching.max_in_flight)
        self.next_row = 0
        self._recorded = recorded
        self._result = result
        self._sequences: dict[int, Sequence] = {}
        self._flights: deque[tuple[BatchPlan, Row]] = deque()
        self._events = deque([*(event for row in recorded.rows for event in row.events), *recorded.later])
        self._told = 0  # events so far
        self._before = _events_before_commits(recorded.rows)
        self._committed = 0

    def run(self) -> None:
        """Live through the record, instant by instant."""
        rows, now_s = self._recorded.rows, -math.inf
        ask_s = math.inf
        while self._flights or self.next_row < len(rows):
            if self._flights:
                now_s = self._flights[0][1].commit_s
                self._tell(self._before_tie_s(now_s), self._before[self._committed])
                self._commit()
                self._tell(now_s)
            else:
                due_s = self._events[0].time_s if self._events else math.inf
                now_s = max(now_s, min(ask_s, rows[self.next_row].schedule_s, due_s))
                self._tell(now_s)
            ask_s = self._fill(now_s)
        self.scheduler.check()

    def _before_tie_s(self, commit_s: float) -> float:
        """Up to when things come before a commit where their number is not on record: whoever waits for an answer comes after it."""
        return math.nextafter(commit_s, -math.inf) if self._recorded.follows_answers else commit_s

    def _tell(self, until_s: float, count: float = math.inf) -> None:
        """Tell the scheduler what happened until then; with ``count``, that many events in all instead."""
        events = self._events
        while events and (self._told < count if count < math.inf else events[0].time_s <= until_s):
            self._told += 1
            event = events.popleft()
            if event.kind == ABORT:
                self.scheduler.abort(event.request_id, event.time_s)
            else:
                self._submit(event)

    def _submit(self, event: Event) -> None:
        seq = self.scheduler.submit(self._recorded.requests[event.request_id], event.time_s)
        refused = isinstance(seq, str)
        if refused != (event.kind == REFUSE):
            self._result.differs(self.next_row, "admission", f"{event.kind} request {event.request_id}", seq if refused else SUBMIT)
            raise _OutOfStepError
        if not refused:
            self._sequences[event.request_id] = seq

    def _fill(self, now_s: float) -> float:
        """Plan as the engine did at this instant; what it did not plan must come out empty. Returns when to ask again."""
        rows, scheduler = self._recorded.rows, self.scheduler
        while len(self._flights) < scheduler.flight.limit:
            row = rows[self.next_row] if self.next_row < len(rows) else None
            expected = row is not None and row.schedule_s == now_s
            if not expected and not scheduler.has_work:
                return math.inf
            plan = scheduler.schedule(now_s)
            if plan.empty and expected:
                self._result.differs(self.next_row, "plan", row.decided, "nothing")
                raise _OutOfStepError
            if plan.empty:
                return plan.ask_again_s if scheduler.waiting_count and plan.ask_again_s > now_s else math.inf
            if not expected and row is None:
                return math.inf  # the record ends here, interrupted
            if not expected:
                self._result.differs(self.next_row, "schedule_s", row.schedule_s, now_s)
                raise _OutOfStepError
            self._compare(row, plan)
            self._flights.append((plan, row))
            self.next_row += 1
        return math.inf

    def _compare(self, row: Row, plan: BatchPlan) -> None:
        pool = self.scheduler.pool
        decided = {
            "step": plan.step,
            "chunks": [(seq.request_id, new) for seq, (new, _) in zip(plan.prefills, plan.chunks)],
            "preempted": [seq.request_id for seq in plan.preempted],
            "decode_seqs": plan.decodes,
            "decode_context_tokens": plan.decode_context_tokens if plan.decodes else 0,
            "kv_blocks_used": pool.total - pool.free,
        }
        for name in CHECKED:
            if row.decided[name] is not None and row.decided[name] != decided[name]:
                self._result.differs(plan.step, name, row.decided[name], decided[name])
                return

    def _commit(self) -> None:
        plan, row = self._flights.popleft()
        finished = []
        for request_id in row.finished:
            seq, status = self._sequences[request_id], self._recorded.status[request_id]
            if status == "error":
                seq.keys = None  # as the engine does: nothing that it computed may be shared
            capped = self._recorded.output_tokens[request_id] >= seq.request.max_output_tokens
            finished.append((seq, "error" if status == "error" else "length" if capped else "stop"))
        tokens = dict(zip(plan.speculating, row.accepted or repeat(1))) if plan.speculating else None  # without drafts one each
        self.scheduler.commit(plan, StepResult(row.commit_s, finished, tokens))
        self._committed += 1


def _events_before_commits(rows: list[Row]) -> list[float]:
    """For each commit in order, how many events of the whole run came before it; infinite where only their times can tell."""
    before: list[float] = []
    committed = told = 0
    for row in rows:
        known = row.events_before_commits
        for position in range(sum(1 for other in rows[committed:] if other.commit_s <= row.schedule_s) if known is None else len(known)):
            before.append(math.inf if known is None else told + known[position])
            committed += 1
        told += len(row.events)
    return before + [math.inf] * (len(rows) - committed)


# -- reading ------------------------------------------------------------------------------------------------------------


def read(run: Run) -> Recorded:
    """Read what parity needs of a run directory. Raises InputError naming what is missing."""
    scenario = from_mapping(run.info["scenario"], shown=str(run.path / "run.yaml"))
    if scenario.cluster.replicas != 1:
        raise InputError(str(run.path), f"is of {scenario.cluster.replicas} replicas; an engine's run is of one")
    if scenario.kv_cache.blocks is None:
        raise InputError(str(run.path / "run.yaml"), "lacks kv_cache.blocks: the pool that the engine had is not known")
    table = run.requests
    ids = table["request_id"].tolist()
    columns = {name: dict(zip(ids, table[name].tolist())) for name in ("arrival_s", "finish_s", "status", "output_tokens")}
    refused_ids = [one for one in ids if columns["status"][one] == "rejected"]
    wanted = {int(one) for submitted in run.plans["submitted"] for one in submitted} | set(refused_ids)
    requests, told_s = _requests(scenario, wanted, columns, run)
    refused = deque(sorted(Event(columns["finish_s"][one], REFUSE, one) for one in refused_ids))
    rows = list(_rows(run, told_s, columns["finish_s"], refused))
    follows = follows_answers(scenario.workload)
    return Recorded(scenario, rows, requests, columns["status"], columns["output_tokens"], follows, list(refused))


def _rows(run: Run, told_s: dict[int, float], finish_s: dict[int, float], refused: deque[Event]) -> Iterator[Row]:
    plans = run.plans
    steps = run.steps if run.has("steps") and len(run.steps) == len(plans) else None
    engine = run.engine_steps["events_before_commits"].tolist() if run.has("engine_steps") else None
    for at, plan in enumerate(plans.itertuples(index=False)):
        submitted = [Event(told_s[one], SUBMIT, one) for one in map(int, plan.submitted)]
        aborted = [Event(finish_s[one], ABORT, one) for one in map(int, plan.aborted)]
        counted = {name: int(steps[name].iat[at]) for name in CHECKED[3:]} if steps is not None else dict.fromkeys(CHECKED[3:])
        decided = {
            "step": int(plan.step),
            "chunks": [(chunk["request_id"], chunk["new_tokens"]) for chunk in plan.chunks],
            "preempted": [int(one) for one in plan.preempted],
            **counted,
        }
        before = None if engine is None else [int(count) for count in engine[at]]
        seen = []
        while refused and refused[0].time_s <= plan.schedule_s:
            seen.append(refused.popleft())
        events = _merged(_merged(submitted, seen), aborted)
        yield Row(plan.schedule_s, plan.commit_s, events, before, [int(one) for one in plan.finished], [int(one) for one in getattr(plan, "accepted", ())], decided)


def _merged(submitted: list[Event], others: list[Event]) -> list[Event]:
    """Both in order of time, at equal times by id, and a submission before its own abort; each list as it was."""
    merged, waiting = [], deque(others)
    for event in submitted:
        while waiting and (waiting[0].time_s, waiting[0].request_id) < (event.time_s, event.request_id):
            merged.append(waiting.popleft())
        merged.append(event)
    return merged + list(waiting)


def _requests(scenario: Scenario, wanted: set[int], columns: dict[str, dict], run: Run) -> tuple[dict[int, Request], dict[int, float]]:
    """Make the workload's requests again, each with the arrival that was recorded, and say when each was submitted."""
    arguments: dict[str, Any] = {
        "seed": scenario.seed, "block_tokens": scenario.kv_cache.block_tokens, "max_model_len": scenario.max_model_len,
        "prefix_caching": scenario.kv_cache.prefix_caching, "slo": scenario.slo,
    }  # fmt: skip
    if follows_answers(scenario.workload):
        made = chain.from_iterable(map(partial(_turns, columns), conversations(scenario.workload, **arguments)))
    else:
        made = ((arrival.request, None) for arrival in open_arrivals(scenario.workload, **arguments))
    requests: dict[int, Request] = {}
    told_s: dict[int, float] = {}
    missing = set(wanted)
    for request, submitted_s in made if wanted else ():
        one = request.request_id
        if one in missing:
            missing.remove(one)
            arrival_s = columns["arrival_s"].get(one, request.arrival_s)  # what never left an interrupted run has no row
            requests[one] = request._replace(arrival_s=arrival_s)
            told_s[one] = arrival_s if submitted_s is None else submitted_s
        if not missing:
            break
    if missing:
        raise InputError(str(run.path), f"request {min(missing)} is not in the scenario's workload", "only a replayed scenario can be checked")
    return requests, told_s


def _turns(columns: dict[str, dict], session: Session) -> Iterator[tuple[Request, float | None]]:
    """The requests of a session; those whose arrival counts from its start were submitted after the answer before them all the same."""
    start_s = columns["arrival_s"].get(session.turns[0].arrival.request.request_id, session.start_s)
    answered_s = start_s
    for turn in session.turns:
        request = turn.arrival.request
        yield request, max(answered_s + turn.gap_s, start_s + turn.not_before_s) if turn.from_start else None
        answered_s = columns["finish_s"].get(request.request_id, answered_s)
