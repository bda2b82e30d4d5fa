"""What a batching policy fills: the token, sequence and block arithmetic of one step.

A policy reads ``tokens_left``, ``seats_left``, ``partials``, ``running``, ``head()`` and calls ``continue_decodes``,
``add_chunk``, ``admit``, ``preempt``. Order matters: preempt for a more urgent request first, then continue the decodes
(preempting until they fit), then partial prefills and admissions. Everything takes effect at once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from serving.plan import BatchPlan
from serving.retention import attended, lasting_blocks
from serving.sequence import PREFILLING, Sequence
from serving.speculation import continue_speculating

if TYPE_CHECKING:
    from serving.scheduler import Scheduler

ADMITTED, NO_SEAT, NO_TOKENS, NO_BLOCKS, ENDED_AT_WALL = "admitted", "no seat", "no tokens", "no blocks", "ended at the wall"
NO_SLOT = "no adapter slot"


class PlanBuilder:
    """One per scheduler, reused for every step."""

    def __init__(self, scheduler: Scheduler) -> None:
        policies = scheduler.policies
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.running = scheduler.running
        self.partials = scheduler.partials  # admitted sequences whose prefill is not complete, in admission order
        self.ordering = policies.ordering
        self.window = policies.window
        self.victim = policies.victim
        self.adapters = policies.adapters
        self.retention = policies.retention
        self.speculates = policies.speculation is not None
        self.evicts_from_s = getattr(policies.ordering, "evicts_from_s", None)
        self.evicts = self.evicts_from_s is not None
        self._skipped: list[tuple[tuple, Sequence]] = []
        self._max_tokens = policies.limits.max_batch_tokens
        self._max_seqs = policies.limits.max_batch_seqs
        self.max_chunk_tokens = policies.limits.max_chunk_tokens or policies.limits.max_batch_tokens
        self.plan: BatchPlan
        self.now_s = 0.0
        self.tokens_left = 0
        self.seats_left = 0
        self.waiting = 0  # requests that wait and have not been bypassed in this plan
        self.decodes = 0  # sequences that are ready to decode
        self.whole_prompts = False  # a policy that never cuts a prompt, and whose token budget is for prompts only, sets this

    # -- life of a plan -------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> BatchPlan:
        """Start an empty plan."""
        scheduler = self.scheduler
        if self.pool.lower is not None:
            self.pool.lower.landed()
        if scheduler.flight.count:
            scheduler.drain_capped()
        self.now_s = now_s
        self.plan = plan = BatchPlan(scheduler, scheduler.steps, now_s, scheduler.clock)
        self.tokens_left = self._max_tokens
        self.seats_left = self._max_seqs - self.running.count
        self.waiting = scheduler.waiting_count
        if scheduler.landing.arrived:
            self._seat_landed()
        self.decodes = scheduler.decoding
        return plan

    def finish(self) -> None:
        """Close the plan: put bypassed requests back, and let it stand for more steps only if nothing else changed in it."""
        if self._skipped:
            self.restore_bypassed()
        plan = self.plan
        plan.logits_rows = plan.decodes * plan.query_tokens_per_decode + len(plan.completing)
        if self.adapters is not None:
            plan.adapters = self.adapters.in_use
        if plan.chunks or plan.preempted or plan.ended or self.speculates:
            plan.valid_until_s = -1.0

    # -- views ----------------------------------------------------------------------------------------------------------

    @property
    def waiting_since_s(self) -> float:
        """Arrival of the first request that found the queue empty: when the present collection began."""
        return self.scheduler.waiting_since_s

    def head(self) -> Sequence | None:
        """The first waiting sequence that is not bypassed."""
        return self.scheduler.head()

    @property
    def decode_blocks(self) -> int:
        """Blocks that the decodes take in their next step."""
        return self.scheduler.phases[self.scheduler.clock % self.pool.block_tokens]

    def needs(self, seq: Sequence) -> tuple[int, int]:
        """Free blocks (cached ones that nobody references included) and tokens that computing all of waiting ``seq`` would use."""
        known = seq.request.prompt_tokens + seq.generated
        blocks, tokens = lasting_blocks(self.retention, self.pool, known, self.max_chunk_tokens), known
        if seq.keys is not None:
            hit = self.pool.match(seq.keys, (known - 1) // self.pool.block_tokens)
            blocks += hit.idle_blocks - hit.blocks
            tokens -= hit.blocks * self.pool.block_tokens
        return blocks, tokens

    # -- decisions ------------------------------------------------------------------------------------------------------

    def continue_decodes(self) -> int:
        """Give every decoding sequence its next token. Returns 0, or the blocks that are short (then nothing has changed)."""
        scheduler, plan = self.scheduler, self.plan
        count = scheduler.decoding
        if not count:
            return 0
        if self.speculates:
            return continue_speculating(self)
        need = scheduler.phases[scheduler.clock % self.pool.block_tokens]
        if need:
            if need > self.pool.free:
                return need - self.pool.free
            self.pool.take(need)
        scheduler.clock = plan.clock = scheduler.clock + 1
        scheduler.context += count
        plan.decodes = count
        plan.decode_context_tokens = scheduler.context
        if not self.whole_prompts:
            self.tokens_left -= count
        return 0

    def add_chunk(self, seq: Sequence, tokens: int | None = None) -> int:
        """Compute up to ``tokens`` (default: what the budgets allow) more of partial ``seq``.

        Returns the tokens taken: 0 when the token budget is used up, or minus the blocks that are short.
        """
        known = seq.request.prompt_tokens + seq.generated
        new = min(known - seq.computed, self.tokens_left, self.max_chunk_tokens)
        if tokens is not None:
            new = min(new, tokens)
        if new <= 0:
            return 0
        need = self.pool.blocks_for(seq.computed + new) - self.pool.blocks_for(seq.computed)
        if need > self.pool.free:
            return self.pool.free - need
        self.pool.take(need)
        self._schedule_chunk(seq, new, known)
        return new

    def admit(self) -> str:
        """Admit the head of the queue and compute its first chunk. Returns ADMITTED, or what stood in the way.

        The pool must have room for all that is known of the sequence, though it takes blocks only as chunks need them.
        """
        scheduler, pool = self.scheduler, self.pool
        if self.seats_left <= 0:
            return NO_SEAT
        seq = scheduler.head()
        known = seq.request.prompt_tokens + seq.generated
        need = pool.blocks_for(known) if self.retention is None else lasting_blocks(self.retention, pool, known, self.max_chunk_tokens)
        if need > pool.total:
            if scheduler.flight.may_end(seq):
                return NO_BLOCKS
            heappop(scheduler.waiting)
            self.waiting -= 1
            scheduler.end_at_wall(seq, self.now_s)
            self.plan.ended = [*self.plan.ended, seq]
            return ENDED_AT_WALL
        if self.adapters is not None and not self.adapters.room_for((seq.request.adapter,)):
            return NO_SLOT
        hit = None
        cached = 0
        found: list[int] = []
        if seq.keys is not None:
            hit = pool.match(seq.keys, (known - 1) // pool.block_tokens)
            cached = hit.blocks * pool.block_tokens
            need += hit.idle_blocks - hit.blocks
            if pool.lower is not None:
                found = self._worth_loading(seq, hit.blocks, (known - 1) // pool.block_tokens)
                cached += sum(found) * pool.block_tokens
        new = min(known - cached, self.tokens_left, self.max_chunk_tokens)
        if new <= 0 or (self.whole_prompts and new < known - cached and self.plan.chunks):
            return NO_TOKENS
        if need > pool.free:
            return NO_BLOCKS
        self._seat(seq)
        if hit is not None and hit.blocks:
            pool.share(seq, hit)
        if found:
            self._load(seq, hit.blocks, found)
        seq.computed = cached
        if not seq.preemptions:
            seq.cached_tokens = cached
        pool.take(pool.blocks_for(cached + new) - seq.shared_blocks)
        self._schedule_chunk(seq, new, known)
        return ADMITTED

    def _worth_loading(self, seq: Sequence, first: int, limit: int) -> list[int]:
        """Pages by lower tier that continue the cached prefix of ``seq``, if the reload policy wants them; else an empty list."""
        lower = self.pool.lower
        found = lower.find(seq.keys, first, limit)
        tokens = sum(found) * self.pool.block_tokens
        wanted = tokens and self.scheduler.policies.reload.load(tokens, lower.load_s(found), self.scheduler)
        return found if wanted else []

    def _load(self, seq: Sequence, first: int, found: list[int]) -> None:
        keys = seq.keys[first : first + sum(found)]
        self.pool.lower.load(keys)
        self.plan.reloads = [*self.plan.reloads, (seq, first, keys)]
        loads = self.plan.loads
        self.plan.loads = [old + new for old, new in zip(loads, found)] if loads else found

    def _seat(self, seq: Sequence) -> None:
        heappop(self.scheduler.waiting)
        self.scheduler.waiting_count -= 1
        self.waiting -= 1
        self._take_seat(seq)
        if self.plan.admitted:
            self.plan.admitted.append(seq)
        else:
            self.plan.admitted = [seq]

    def _take_seat(self, seq: Sequence) -> None:
        scheduler = self.scheduler
        scheduler.admissions = seq.admission_index = scheduler.admissions + 1
        if seq.scheduled_s != seq.scheduled_s:
            seq.scheduled_s = self.now_s
        self.running.add(seq)
        self.seats_left -= 1
        if self.adapters is not None and seq.request.adapter:
            self.plan.adapter_loads += self.adapters.take(seq.request.adapter, scheduler)

    def _seat_landed(self) -> None:
        """Seat the sequences whose KV has arrived from another replica, first come, first served: nothing is left to decide."""
        landed = []
        while self.seats_left > 0 and (seq := self.scheduler.landing.next_arrived()) is not None:
            self._take_seat(seq)
            self.scheduler.join_decodes(seq)
            landed.append(seq)
        self.plan.landed = landed

    def _schedule_chunk(self, seq: Sequence, new: int, known: int) -> None:
        plan = self.plan
        chunk = (new, attended(seq, self.pool.block_tokens) if seq.dropped else seq.computed)
        if plan.chunks:
            plan.chunks.append(chunk)
            plan.prefills.append(seq)
        else:
            plan.chunks = [chunk]
            plan.prefills = [seq]
        self.tokens_left -= new
        seq.computed += new
        if seq.computed == known:
            if seq.state == PREFILLING:
                self.scheduler.partials.remove(seq)
            if plan.completing:
                plan.completing.append(seq)
            else:
                plan.completing = [seq]
            self.scheduler.enter_decoding(seq)
        elif seq.state != PREFILLING:
            seq.state = PREFILLING
            self.scheduler.partials.append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Evict ``seq``, which must not hold a chunk in this plan; it waits again, at its place in the order.

        The last running sequence gains nothing from its own eviction when even the whole pool is too small for it: it ends, unless
        a step in flight may have ended it already.
        """
        scheduler = self.scheduler
        if self.running.count == 1 and not scheduler.flight.count and not self._fits_alone(seq):
            scheduler.end_at_wall(seq, self.now_s)
            self.plan.ended = [*self.plan.ended, seq]
        else:
            scheduler.preempt(seq)
            self.plan.preempted = [*self.plan.preempted, seq]
            self.waiting += 1
        self.decodes = scheduler.decoding
        self.seats_left += 1

    def _fits_alone(self, seq: Sequence) -> bool:
        return self.pool.blocks_for(self.running.computed(seq) + 1) - seq.dropped <= self.pool.total

    def bypass(self) -> None:
        """Set the head aside for this plan, so that the next in the queue becomes the head."""
        self._skipped.append(heappop(self.scheduler.waiting))
        self.waiting -= 1

    def restore_bypassed(self) -> None:
        """Put the bypassed requests back in the queue."""
        for entry in self._skipped:
            heappush(self.scheduler.waiting, entry)
        self.waiting += len(self._skipped)
        self._skipped.clear()

    def limit_tokens(self, tokens: int) -> None:
        """Leave this step at most ``tokens`` more."""
        self.tokens_left = min(self.tokens_left, tokens)

    def valid_until(self, until_s: float) -> None:
        """Promise the same decision for every later step that starts before ``until_s``, barring an event."""
        self.plan.valid_until_s = until_s

    def ask_again(self, at_s: float) -> None:
        """Say when an empty plan is worth asking for again."""
        self.plan.ask_again_s = at_s
