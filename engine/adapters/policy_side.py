"""Our policies at work in another engine: its requests as our sequences, its queue and batch as the views that policies read.

Of the protocols in ``serving.policies.protocols`` another engine can be given Ordering (``key``, ``evicts_from_s``), Window, Victim and the
budgets of a step; what a step holds (Batching) is its own code, and who may queue at all (Admission) is decided in front of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from serving.errors import InputError
from serving.memory import blocks_for
from serving.plan import Outcome
from serving.policies.build import build_policies
from serving.request import Request
from serving.running import Running
from serving.scenario import Scenario
from serving.sequence import PREFILLING, WAITING, Sequence

ADAPTED_BATCHING = ("chunked_prefill",)  # the batching policy that vLLM's own step is
ADMISSION_IN_FRONT = ("fits", "always")


class Theirs(Protocol):
    """A request of the other engine, as far as it is looked at."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int


class QueueView:
    """The part of ``serving.scheduler.Scheduler`` that policies may ask about here."""

    def __init__(self, cached_tokens: Callable[[Theirs], int]) -> None:
        """``cached_tokens(their request)`` looks up the other engine's prefix cache."""
        self.now_s = -math.inf
        self.submitted = 0
        self.waiting_count = 0
        self.waiting_since_s = math.inf
        self.running = Running(None)
        self._cached_tokens = cached_tokens
        self._ranked: Theirs | None = None

    def cached_tokens(self, request: Request) -> int:
        """Prompt tokens of the request that is being ranked which the other engine's prefix cache holds now."""
        return self._cached_tokens(self._ranked)

    def rank(self, ordering: Any, request: Request, theirs: Theirs) -> tuple:
        """The ordering policy's key of ``request``."""
        self._ranked = theirs
        return ordering.key(request, self)


class BatchView:
    """The part of ``serving.builder.PlanBuilder`` that a window policy reads."""

    def __init__(self, now_s: float, queue: QueueView) -> None:
        self.now_s = now_s
        self.waiting = queue.waiting_count
        self.waiting_since_s = queue.waiting_since_s
        self.running = queue.running
        self.decodes = len(queue.running)


class PolicySide:
    """The policies of ``scenario`` and the sequences they decide about. One engine, one thread; times are arguments, in seconds of one clock."""

    def __init__(self, scenario: Scenario, block_tokens: int, cached_tokens: Callable[[Theirs], int]) -> None:
        """Raises InputError for a policy that the other engine cannot be given."""
        policy = scenario.policy
        _refuse_what_is_theirs(policy)
        self.policies = build_policies(policy)
        self.limits = self.policies.limits
        self.queue = QueueView(cached_tokens)
        self._slo = scenario.slo
        self._classes = {row.priority: row.name for row in scenario.workload.classes}
        self._block_tokens = block_tokens
        self._seqs: dict[str, Sequence] = {}
        self._theirs: dict[int, Theirs] = {}
        self._observers = self.policies.observers()
        self._evicts_from_s = getattr(self.policies.ordering, "evicts_from_s", None)

    # -- requests come and go -------------------------------------------------------------------------------------------

    def enter(self, theirs: Theirs, arrival_s: float, now_s: float) -> Sequence:
        """Rank a request that is queued for the first time."""
        name = self._classes.get(theirs.priority, "default")
        request = Request(
            self.queue.submitted, arrival_s, theirs.num_prompt_tokens, theirs.max_tokens, theirs.priority, name,
            ttft_slo_s=self._slo.targets(name).ttft_s,
        )  # fmt: skip
        self.queue.now_s = now_s
        seq = Sequence(request, self.queue.rank(self.policies.ordering, request, theirs), None, None)
        self.queue.submitted += 1
        if not self.queue.waiting_count:
            self.queue.waiting_since_s = arrival_s
        self.queue.waiting_count += 1
        self._seqs[theirs.request_id] = seq
        self._theirs[seq.request_id] = theirs
        return seq

    def seq(self, theirs: Theirs) -> Sequence:
        """Our side of a request."""
        return self._seqs[theirs.request_id]

    def key_of(self, theirs: Theirs) -> tuple:
        """Its place in the order."""
        return self._seqs[theirs.request_id].key

    def knows(self, their_id: str) -> bool:
        """Whether the request is here."""
        return their_id in self._seqs

    def leave(self, theirs: Theirs, now_s: float, status: str) -> Sequence:
        """A request has left: tell the policies that learn, and forget it."""
        seq = self._seqs.pop(theirs.request_id)
        del self._theirs[seq.request_id]
        self.queue.waiting_count -= seq.state == WAITING
        seq.generated, seq.preemptions = theirs.num_output_tokens, theirs.num_preemptions
        request = seq.request
        outcome = Outcome(
            request.class_name, request.priority, request.arrival_s, seq.scheduled_s, seq.first_token_s, now_s, request.prompt_tokens,
            seq.generated, seq.preemptions, status, request.ttft_slo_s,
        )  # fmt: skip
        for observe in self._observers:
            observe(outcome)
        return seq

    # -- decisions of a step --------------------------------------------------------------------------------------------

    def look(self, running: Iterable[Theirs], waiting: int, now_s: float) -> None:
        """Bring the views up to date before a step: who runs, in the order of admission, and how many wait."""
        view = Running(None)
        seqs = []
        for theirs in running:
            seq = self._seqs[theirs.request_id]
            seq.state, seq.computed = PREFILLING, theirs.num_computed_tokens
            seq.generated, seq.preemptions = theirs.num_output_tokens, theirs.num_preemptions
            seqs.append(seq)
        for seq in sorted(seqs, key=lambda seq: seq.admission_index):
            view.add(seq)
        self.queue.now_s, self.queue.running = now_s, view
        self.queue.waiting_count = waiting
        if not waiting:
            self.queue.waiting_since_s = math.inf

    def admitted(self, theirs: Theirs, number: int, now_s: float) -> None:
        """A request got a seat, its ``number``-th admission in all."""
        seq = self._seqs[theirs.request_id]
        seq.state = PREFILLING
        self.queue.waiting_count -= 1
        seq.admission_index = number
        if math.isnan(seq.scheduled_s):
            seq.scheduled_s = now_s

    def window_opens_s(self, now_s: float) -> float:
        """When waiting requests may be admitted (at or before ``now_s``: now)."""
        return self.policies.window.open_s(BatchView(now_s, self.queue))

    def evict_for_urgent(self, waiting: Iterable[Theirs], seats: int, free_blocks: int, now_s: float) -> list[Theirs]:
        """Who must give way, so that urgent waiting requests get in now; nobody gives way to one who would not fit all the same."""
        if self._evicts_from_s is None:
            return []
        evicted: list[Theirs] = []
        for theirs in waiting:
            seq = self._seqs[theirs.request_id]
            if self._evicts_from_s(seq.request) > now_s:
                break
            seats -= 1
            free_blocks -= blocks_for(seq.request.prompt_tokens + theirs.num_output_tokens, self._block_tokens)
            chosen: list[Sequence] = []
            while seats < 0 or free_blocks < 0:
                victim = self.policies.victim.choose(self.queue.running, seq)
                if victim is None:
                    for one in chosen:
                        self.queue.running.add(one)
                    return evicted
                self.queue.running.remove(victim)
                chosen.append(victim)
                seats += 1
                free_blocks += self._held(victim)
            evicted += [self._theirs[victim.request_id] for victim in chosen]
        return evicted

    def in_order_of_service(self, running: list[Theirs], short_blocks: int) -> list[Theirs]:
        """``running`` in the order of admission, those whom the victim policy would evict for ``short_blocks`` blocks at the end, the first victim last.

        vLLM serves from the front and evicts from the back.
        """
        view, last = self.queue.running, []
        while short_blocks > 0 and len(view) > 1:
            victim = self.policies.victim.choose(view, None)
            view.remove(victim)
            last.append(victim.request_id)
            short_blocks -= self._held(victim)
        places = {request_id: place for place, request_id in enumerate(last)}

        def place(theirs: Theirs) -> tuple[int, int]:
            seq = self._seqs[theirs.request_id]
            return (-places.get(seq.request_id, len(places)), seq.admission_index)

        return sorted(running, key=place)

    def short_blocks(self, running: Iterable[Theirs], free_blocks: int) -> int:
        """Blocks that a step of all of ``running`` lacks; 0 or less when it lacks none. Chunks count as far as the budget of tokens goes."""
        need, tokens = 0, self.limits.max_batch_tokens
        for theirs in running:
            known = theirs.num_prompt_tokens + theirs.num_output_tokens
            new = max(1, min(known - theirs.num_computed_tokens, self.limits.max_chunk_tokens or tokens, tokens))
            tokens = max(0, tokens - new)
            have = theirs.num_computed_tokens
            need += blocks_for(have + new, self._block_tokens) - blocks_for(have, self._block_tokens)
        return need - free_blocks

    def back_in_queue(self, theirs: Theirs) -> None:
        """A running request was preempted."""
        seq = self._seqs[theirs.request_id]
        seq.state, seq.computed = WAITING, 0
        if not self.queue.waiting_count:
            self.queue.waiting_since_s = seq.request.arrival_s
        self.queue.waiting_count += 1

    def _held(self, seq: Sequence) -> int:
        return blocks_for(seq.computed, self._block_tokens)


def _refuse_what_is_theirs(policy: Any) -> None:
    batching = policy.batching
    if batching.name not in ADAPTED_BATCHING:
        raise InputError("policy.batching.name", f"'{batching.name}' cannot be given to another engine: what a step holds is its own code", "chunked_prefill")
    if batching.head_of_line != "block":
        raise InputError("policy.batching.head_of_line", "vLLM never passes a request that does not fit", "block")
    if policy.admission.name not in ADMISSION_IN_FRONT:
        raise InputError("policy.admission", f"'{policy.admission.name}' belongs in front of vLLM: it has no way to refuse a request", "fits")
