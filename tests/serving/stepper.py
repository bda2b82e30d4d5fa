"""Drives a scheduler with nothing but a loop, and looks at everything after every step.

The loop stands for an engine: it names blocks, keeps their content, executes plans in order, and may plan one step ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from drivers import Case

from serving.plan import BatchPlan, StepResult
from serving.request import Arrival
from serving.sequence import DECODING, PREFILLING, WAITING, Sequence
from sim.oracle import Oracle


class Stepper:
    """Serves arrivals on one scheduler. ``memory``: also write, keep and read the content of every block."""

    def __init__(self, case: Case, *, memory: bool = False) -> None:
        self.case = case
        self.scheduler = case.scheduler(named=memory)
        self.oracle = Oracle()
        self.memory = memory
        self.now_s = 0.0
        self.flying: list[tuple[BatchPlan, list, float]] = []  # plan, what it reads and writes, its duration
        self.sequences: dict[int, Sequence] = {}
        self.refused: dict[int, str] = {}
        self.left: dict[int, tuple[str, float]] = {}
        self.sampled = 0  # tokens that committed plans produced
        self.steps = 0
        self.plans: list[BatchPlan] = []
        self._content: dict[int, list] = {}

    # -- the loop -------------------------------------------------------------------------------------------------------

    def run(self, arrivals: Iterable[Arrival], aborts: Iterable[tuple[float, int]] = (), max_steps: int = 100_000) -> Stepper:
        """Serve to the end; fails when that takes more than ``max_steps`` steps."""
        events = [(arrival.request.arrival_s, 0, arrival.request.request_id, arrival) for arrival in arrivals]
        events += [(at_s, 1, request_id, None) for at_s, request_id in aborts]
        events.sort(key=lambda event: event[:3], reverse=True)
        while True:
            asked_s = self._plan()
            end_s = self.now_s + self.flying[0][2] if self.flying else asked_s
            if events and events[-1][0] <= end_s:
                self._event(*events.pop())
            elif self.flying:
                self.now_s = end_s
                self._commit()
                self.steps += 1
                assert self.steps <= max_steps, f"no end after {max_steps} steps: {self.scheduler.waiting_count} wait"
            elif end_s < math.inf:
                self.now_s = end_s
            else:
                break
        self.scheduler.check()
        assert not self.scheduler.has_work and not self.flying
        assert self.scheduler.pool.free == self.scheduler.pool.total, "somebody left and kept blocks"
        return self

    def _event(self, at_s: float, kind: int, request_id: int, arrival: Arrival | None) -> None:
        # A step under way goes on: the time that is left of it must not change.
        if self.flying:
            plan, work, duration_s = self.flying[0]
            self.flying[0] = (plan, work, duration_s - max(0.0, at_s - self.now_s))
        self.now_s = max(self.now_s, at_s)
        if kind:
            if self.scheduler.abort(request_id, self.now_s) is not None:
                self.oracle.forget(request_id)
                self.left[request_id] = ("aborted", self.now_s)
        else:
            admitted = self.scheduler.submit(arrival.request, self.now_s)
            if isinstance(admitted, str):
                self.refused[request_id] = admitted
            else:
                self.sequences[request_id] = admitted
                self.oracle.expect(request_id, min(arrival.output_tokens, arrival.request.max_output_tokens))
        self.scheduler.check()

    def _plan(self) -> float:
        """Plan as far ahead as allowed, at step boundaries; returns when to ask again if there is nothing to execute."""
        scheduler = self.scheduler
        while len(self.flying) < self.case.max_in_flight and not (self.flying and self.flying[0][0].now_s != self.now_s):
            plan = scheduler.schedule(self.now_s)
            for seq in plan.ended:
                self.oracle.forget(seq.request_id)
                self.left[seq.request_id] = ("kv_capacity", self.now_s)
            scheduler.check()
            self._check_plan(plan)
            if plan.empty:
                return plan.ask_again_s if scheduler.waiting_count else math.inf
            self.plans.append(plan)
            self.flying.append((plan, self._work(plan), self.case.latency.step_s(plan)))
        return math.inf

    def _commit(self) -> None:
        plan, work, _ = self.flying.pop(0)
        self._execute(work)
        finished = self.oracle.finished(plan)
        self.sampled += plan.decodes - plan.withdrawn + len(plan.completing)
        self.scheduler.commit(plan, StepResult(self.now_s, finished))
        for seq, reason in finished:
            self.left[seq.request_id] = (reason, self.now_s)
        self.scheduler.check()

    # -- what every plan must obey ----------------------------------------------------------------------------------------

    def _check_plan(self, plan: BatchPlan) -> None:
        case, scheduler = self.case, self.scheduler
        new_tokens = sum(new for new, _ in plan.chunks)
        whole = case.policies.get("batching", ("",))[0] == "whole_prompt"
        assert new_tokens + (0 if whole else plan.decodes) <= case.max_batch_tokens
        assert len(scheduler.running) <= case.max_batch_seqs
        assert len(set(plan.prefills)) == len(plan.prefills), "two chunks of one sequence in one step"
        assert not {seq for seq in plan.preempted if seq.state == WAITING} & set(plan.prefills)
        for seq, (new, before) in zip(plan.prefills, plan.chunks):
            assert 0 < new <= (case.max_chunk_tokens or case.max_batch_tokens)
            assert seq.state in (PREFILLING, DECODING) and seq.computed == before + new
        if not self.flying:
            decoding = [seq for seq in scheduler.running if seq.state == DECODING and seq not in plan.completing]
            contexts = sum(scheduler.computed_at(seq, scheduler.clock) for seq in decoding)
            assert plan.decodes in (0, len(decoding)) and plan.decode_context_tokens in (0, contexts)
            assert not plan.decodes or plan.decoding() == decoding
        assert plan.logits_rows == plan.decodes + len(plan.completing)

    # -- a small machine ----------------------------------------------------------------------------------------------------

    def _work(self, plan: BatchPlan) -> list:
        """(sequence, block table, tokens already there, tokens after) of all that the plan computes, as it stands now."""
        if not self.memory:
            return []
        scheduler, work = self.scheduler, []
        for seq, (new, before) in zip(plan.prefills, plan.chunks):
            work.append((seq, list(scheduler.pool.name_blocks(seq, before + new)), before, before + new))
        for seq in plan.decoding():
            after = scheduler.computed_at(seq, plan.clock)
            work.append((seq, list(scheduler.pool.name_blocks(seq, after)), after - 1, after))
        return work

    def _execute(self, work: list) -> None:
        width = self.scheduler.pool.block_tokens
        for seq, table, before, after in work:
            for position in range(before):
                held = self._content[table[position // width]][position % width]
                assert held == self._token(seq, position), f"{seq} reads {held} at {position}"
            for position in range(before, after):
                self._content.setdefault(table[position // width], [None] * width)[position % width] = self._token(seq, position)

    def _token(self, seq: Sequence, position: int) -> tuple:
        """The token at a position: that of the named block it lies in, else one of the sequence's own."""
        block = position // self.scheduler.pool.block_tokens
        keys = seq.request.prefix_hashes
        if block < len(keys):
            return (keys[block], position)
        if seq.request.generated_hash_seed is not None:
            return (seq.request.generated_hash_seed, position)
        return (seq.request_id, position)
