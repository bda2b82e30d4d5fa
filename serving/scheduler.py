"""The one mechanism: it plans steps with the policies it is given and commits what came of them.

    schedule(now_s) -> BatchPlan         the policies fill a PlanBuilder; the effects are applied at once
    commit(plan, result)                 first tokens, cache entries, finishes

Counters advance when a step is *planned*, so that the next step may be planned before this one's result is known
(``max_in_flight``). Plans run in order on one stream: a block given back while a plan is in flight can only be written by a
plan that runs after it.

All decoding sequences are one aggregate: their number, the sum of their contexts, a clock that counts decode steps, and for
each position within a block the number of sequences there, which gives the blocks that the next step needs. A sequence's own
counters are settled when it leaves, so a step costs what changes in it, not what runs in it.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from serving.builder import PlanBuilder
from serving.checks import check_scheduler
from serving.errors import BrokenPolicyError
from serving.in_flight import InFlight
from serving.kv_pool import KVPool
from serving.landing import Landing
from serving.plan import BatchPlan, Outcome, StepResult
from serving.policies import Policies
from serving.request import Request
from serving.retention import attended, retain
from serving.running import Running
from serving.sequence import DECODING, DRAINING, ENDED, PARKED, PREFILLING, WAITING, Sequence
from serving.speculation import commit_accepted

HAND_OVER = "hand_over"  # a finish reason: the sequence goes on elsewhere; it keeps its pages here until they are copied


class Scheduler:
    """Schedules one replica. ``limits`` are the budgets of a step; ``policies`` are the decisions.

    Drive it with ``submit`` / ``abort`` for requests and ``schedule`` / ``commit`` for steps. It keeps no clock: every time is
    an argument. It never sees how many tokens a request will generate.
    """

    def __init__(self, pool: KVPool, policies: Policies, *, max_in_flight: int = 1) -> None:
        if policies.speculation is not None and max_in_flight > 1:
            raise ValueError("with speculation the next step needs this one's tokens: only one plan can be in flight")
        self.pool = pool
        self.policies = policies
        self.flight = InFlight(max_in_flight)
        self.landing = Landing(self)
        self.steps = 0
        self.preemptions = 0
        self.submitted = 0
        self.dropped_blocks = 0  # pages given back by running sequences
        self.admissions = 0
        self.waiting_count = 0
        self.waiting_since_s = math.inf
        self.waiting: list[tuple[tuple, Sequence]] = []  # a heap; sequences that left are skipped when they surface
        self.partials: list[Sequence] = []
        self.running = Running(self)
        self.clock = 0  # decode steps planned so far
        self.decoding = 0
        self.decoded_s = math.nan  # end of the latest committed step that decoded
        self.prefill_token_s = math.nan  # what a token of a step with prompts cost of late, kept where the pool has lower tiers
        self.context = 0  # sum of `computed` over the decoding sequences
        self.phases = [0] * pool.block_tokens  # decoding sequences by the clock at which they next need a block
        self.now_s = -math.inf
        self._live: dict[int, Sequence] = {}
        self._capped: list[tuple[int, int, int, Sequence]] = []  # when each decode will have all the tokens it may generate
        self.speculates = policies.speculation is not None
        self._builder = PlanBuilder(self)
        self._observers = policies.observers()

    # -- requests -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> Sequence | str:
        """Queue ``request`` and return its sequence, or return the name of the limit for which it is refused."""
        self.now_s = now_s
        refusal = self.policies.admission.admit(request, self)
        if refusal is not None:
            return refusal
        named = self.pool.prefix_caching and (request.prefix_hashes or request.generated_hash_seed is not None)
        seq = self.enter(request, request.prefix_hashes if named else None, now_s)
        self._enqueue(seq)
        return seq

    def enter(self, request: Request, keys: tuple | None, now_s: float) -> Sequence:
        """Make the sequence of a request that is here from now on. Raises ValueError when its id is here already."""
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is here already")
        self.now_s = now_s
        self.submitted += 1
        seq = self._live[request.request_id] = Sequence(request, self.policies.ordering.key(request, self), keys, self.pool.root)
        return seq

    def _enqueue(self, seq: Sequence) -> None:
        heappush(self.waiting, (seq.key, seq))
        if not self.waiting_count:
            self.waiting_since_s = seq.request.arrival_s
        self.waiting_count += 1

    def abort(self, request_id: int, now_s: float) -> Sequence | None:
        """Drop a request in whatever state it is; returns its sequence, or None when it is not (or no longer) here."""
        seq = self._live.get(request_id)
        if seq is None:
            return None
        undelivered = self.flight.withdraw(seq)
        if seq.state == WAITING:
            self.waiting_count -= 1
        else:
            if seq.state == PARKED:
                self.landing.parked -= 1
            else:
                self.leave(seq, self.clock)
                self._publish_all(seq)
            self.pool.release(seq)
        seq.generated -= undelivered
        self.end(seq, now_s, "aborted")
        return seq

    def cached_tokens(self, request: Request) -> int:
        """Prompt tokens of ``request`` that the prefix cache holds now (for ordering and routing policies)."""
        keys = request.prefix_hashes
        if not keys or not self.pool.prefix_caching:
            return 0
        return self.pool.match(keys, (request.prompt_tokens - 1) // self.pool.block_tokens).blocks * self.pool.block_tokens

    # -- steps ----------------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> BatchPlan:
        """Plan the next step. An empty plan means that there is nothing to do before ``plan.ask_again_s`` or an arrival."""
        flight = self.flight
        if flight.count >= flight.limit:
            raise RuntimeError(f"{flight.count} plans are in flight already; commit one first")
        self.now_s = now_s
        builder = self._builder
        earlier = None
        while True:
            plan = builder.begin(now_s)
            self.policies.batching.plan(builder)
            builder.finish()
            if earlier is not None:
                plan.preempted, plan.ended = [*earlier.preempted, *plan.preempted], [*earlier.ended, *plan.ended]
                plan.landed = [*earlier.landed, *plan.landed]
                plan.valid_until_s = -1.0
            if plan.chunks or plan.decodes:
                flight.add(plan)
                self.steps += 1
                return plan
            made_room = len(plan.preempted) + len(plan.ended)
            if made_room > (0 if earlier is None else len(earlier.preempted) + len(earlier.ended)):
                if flight.count:
                    return plan  # what is in flight may have been the last of those who gave way: wait for it
                earlier = plan  # it only made room: plan again with it, and answer for both
                continue
            if self.running.count and not flight.count:
                raise BrokenPolicyError(
                    f"batching policy {type(self.policies.batching).__name__}, step {plan.step}: sequences run but the plan is empty"
                )
            if self.waiting_count and not flight.count and not self.landing.parked and not plan.ask_again_s > now_s:
                raise BrokenPolicyError(
                    f"batching policy {type(self.policies.batching).__name__}, step {plan.step}: an empty plan with requests queued must "
                    "say when to ask again"
                )
            return plan

    def steps_possible(self, plan: BatchPlan, limit: int) -> int:
        """How many successive steps, at most ``limit``, the decode-only ``plan`` can stand for before blocks run short."""
        free, width, count = self.pool.free, self.pool.block_tokens, self.decoding
        spare = free // count
        if limit <= spare * width:
            return limit  # every sequence could take its next `spare` blocks
        steps = 1 + spare * width
        free -= spare * count
        phases, clock = self.phases, self.clock
        while steps < limit:
            free -= phases[clock % width]
            if free < 0:
                break
            clock += 1
            steps += 1
        return min(steps, limit)

    def extend(self, plan: BatchPlan, more: int, blocks: int | None = None) -> None:
        """Apply ``more`` further steps of a decode-only plan (``steps_possible`` allows them) as if each had been planned.

        ``blocks`` is what they take, where the caller has counted it already.
        """
        if blocks is None:
            width = self.pool.block_tokens
            rounds, rest = divmod(more, width)
            blocks = rounds * self.decoding
            for offset in range(rest):
                blocks += self.phases[(self.clock + offset) % width]
        if blocks:
            self.pool.take(blocks)
        self.clock += more
        self.context += more * self.decoding
        self.steps += more
        plan.steps += more
        plan.clock += more

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Take in the result of the oldest plan in flight: cache entries, first tokens, finishes (in the order given)."""
        self.flight.take(plan)
        end_s = result.end_s
        if plan.chunks:
            self._publish_chunks(plan)
            if self.pool.lower is not None:
                self._note_prefill(plan, end_s)
        if plan.decodes:
            self.decoded_s = end_s
            if plan.speculating:
                commit_accepted(self, plan, result.tokens)
        if self.policies.retention is not None:
            retain(self, plan, result)
        for seq in plan.departed:
            seq.token_s = end_s
        for seq in plan.completing:
            seq.token_s = end_s
            if seq.first_token_s != seq.first_token_s:
                seq.first_token_s = end_s
        for seq, reason in result.finished:
            if seq.state == ENDED:
                continue  # aborted while in flight
            if seq.state == WAITING:  # preempted by a plan made before this result was known
                self.waiting_count -= 1
            else:
                self.leave(seq, plan.clock)
                if seq.keys is not None:
                    self._publish_all(seq)
                if reason == HAND_OVER:
                    self.landing.park(seq)
                    continue
                self.pool.release(seq)
            self.end(seq, end_s, reason)

    def _publish_chunks(self, plan: BatchPlan) -> None:
        for seq, (new, before) in zip(plan.prefills, plan.chunks):
            if seq.keys is not None and WAITING < seq.state < PARKED:
                full = min((before + new) // self.pool.block_tokens, len(seq.keys))
                if full > seq.shared_blocks:
                    self.pool.publish(seq, seq.keys[seq.shared_blocks : full])

    def _note_prefill(self, plan: BatchPlan, end_s: float) -> None:
        """Keep a running mean of what a token of a step with prompts costs, for whoever weighs computing against reading."""
        cost_s = (end_s - plan.now_s) / (plan.decodes + sum(new for new, _ in plan.chunks))
        known = self.prefill_token_s == self.prefill_token_s
        self.prefill_token_s = 0.9 * self.prefill_token_s + 0.1 * cost_s if known else cost_s

    # -- changes of state (used by the builder and by commit) -------------------------------------------------------------

    def enter_decoding(self, seq: Sequence) -> None:
        """The prefill of ``seq`` catches up in the step being planned: count the token it samples, decode from the next."""
        seq.generated += 1
        self.join_decodes(seq)

    def join_decodes(self, seq: Sequence) -> None:
        """Add ``seq``, all of whose KV but the latest token's is there, to the decodes that the next continuation serves."""
        seq.state = DECODING
        seq.entry_clock = clock = self.clock
        if not self.speculates:
            self.phases[(clock - seq.computed) % self.pool.block_tokens] += 1
        self.decoding += 1
        self.context += attended(seq, self.pool.block_tokens) if seq.dropped else seq.computed
        if self.flight.limit > 1:
            last_clock = clock + seq.request.max_output_tokens - seq.generated
            heappush(self._capped, (last_clock, seq.request_id, seq.preemptions, seq))

    def drain_capped(self) -> None:
        """With plans in flight whose tokens are not known yet: stop decoding sequences that are at their token limit already."""
        capped = self._capped
        while capped and capped[0][0] <= self.clock:
            _, _, preemptions, seq = heappop(capped)
            if seq.preemptions == preemptions and seq.state == DECODING:
                self.flight.depart(seq)
                self._stop_decoding(seq)
                seq.state = DRAINING

    def computed_at(self, seq: Sequence, clock: int) -> int:
        """KV entries of decoding ``seq`` once the decode step numbered ``clock`` has run."""
        return seq.computed if self.speculates else seq.computed + clock - seq.entry_clock

    def settle(self, seq: Sequence) -> None:
        """Bring the counters of a decoding sequence up to the decode clock."""
        if self.speculates:
            return
        elapsed = self.clock - seq.entry_clock
        seq.computed += elapsed
        seq.generated += elapsed
        seq.entry_clock = self.clock

    def leave(self, seq: Sequence, committed_clock: int) -> None:
        """Take ``seq`` out of the running set; tokens of decode steps after ``committed_clock`` are not counted as generated."""
        self.running.remove(seq)
        if self.policies.adapters is not None and seq.request.adapter:
            self.policies.adapters.give_back(seq.request.adapter)
        if seq.state == DECODING:
            ahead = self.clock - max(committed_clock, seq.entry_clock)
            self._stop_decoding(seq)
            if not self.speculates:
                seq.generated -= ahead
        elif seq.state == PREFILLING:
            self.partials.remove(seq)

    def _stop_decoding(self, seq: Sequence) -> None:
        under_way = self.flight.tokens_of(seq) if self.flight.count else 0
        if self.decoded_s > seq.token_s and self.clock - seq.entry_clock > under_way:
            seq.token_s = self.decoded_s
        self.settle(seq)
        if not self.speculates:
            self.phases[(self.clock - seq.computed) % self.pool.block_tokens] -= 1
        self.decoding -= 1
        self.context -= attended(seq, self.pool.block_tokens) if seq.dropped else seq.computed

    def preempt(self, seq: Sequence) -> None:
        """Evict a running sequence: its pages are released (their content stays cached), it waits to be recomputed."""
        self.flight.depart(seq)
        self.leave(seq, self.clock)
        if self.pool.prefix_caching:
            if seq.keys is None and seq.computed >= self.pool.block_tokens:
                # Content that nobody else can name is still worth finding again: give it a name of its own.
                own = ("own", seq.request_id)
                seq.keys = tuple((own, index) for index in range(seq.request.prompt_tokens // self.pool.block_tokens))
            self._publish_all(seq)
        self.pool.release(seq)
        seq.computed = seq.calm_steps = 0
        seq.preemptions += 1
        seq.state = WAITING
        self.preemptions += 1
        self._enqueue(seq)

    def end_at_wall(self, seq: Sequence, now_s: float) -> None:
        """Close a sequence that could not grow even if it had the whole pool."""
        if seq.state == WAITING:
            self.waiting_count -= 1
        else:
            self.leave(seq, self.clock)
            self.pool.release(seq)
        self.end(seq, now_s, "kv_capacity")

    def _publish_all(self, seq: Sequence) -> None:
        """Cache every full block that ``seq`` has computed, generated ones included; extends its keys to name them."""
        keys = seq.keys
        if keys is None:
            return
        full = seq.computed // self.pool.block_tokens
        if full > len(keys):
            seed = seq.request.generated_hash_seed or ("own", seq.request_id)
            seq.keys = keys = keys + tuple((seed, index) for index in range(len(keys), full))
        if full > seq.shared_blocks:
            self.pool.publish(seq, keys[seq.shared_blocks : full])

    def end(self, seq: Sequence, now_s: float, status: str) -> None:
        """``seq``, which holds nothing any more, is gone; tell the policies that learn."""
        seq.state = ENDED
        del self._live[seq.request_id]
        if self._observers:
            request = seq.request
            outcome = Outcome(
                request.class_name, request.priority, request.arrival_s, seq.scheduled_s, seq.first_token_s, now_s,
                request.prompt_tokens, seq.generated, seq.preemptions, status, request.ttft_slo_s,
            )  # fmt: skip
            for observe in self._observers:
                observe(outcome)

    # -- views ----------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting_count or self.running.count or self.landing.arrived)

    def live(self) -> list[Sequence]:
        """Every sequence that is here, in order of submission."""
        return list(self._live.values())

    def head(self) -> Sequence | None:
        """The first waiting sequence in the ordering policy's order."""
        waiting = self.waiting
        while waiting and waiting[0][1].state != WAITING:
            heappop(waiting)
        return waiting[0][1] if waiting else None

    def decoding_in(self, plan: BatchPlan) -> list[Sequence]:
        """The sequences that decode in the latest plan, in admission order (those it completes decode from the next step)."""
        if not plan.decodes:
            return []
        return [seq for seq in self.running if seq.state == DECODING and seq.entry_clock < plan.clock]

    def held_blocks(self, seq: Sequence) -> int:
        """Pages that ``seq`` would give back to the pool for certain: the private ones."""
        return self.pool.blocks_for(self.running.computed(seq)) - seq.shared_blocks - seq.dropped

    def check(self) -> None:
        """Raise AssertionError unless the aggregate, the queues and the pool agree with the sequences."""
        check_scheduler(self)
