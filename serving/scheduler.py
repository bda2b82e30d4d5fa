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
from collections import deque
from heapq import heappop, heappush

from serving.builder import PlanBuilder
from serving.kv_pool import KVPool
from serving.plan import BatchPlan, Outcome, StepResult
from serving.policies import Policies
from serving.request import Request
from serving.running import Running
from serving.sequence import DECODING, DRAINING, ENDED, PARKED, PREFILLING, WAITING, Sequence
from serving.speculation import commit_accepted

HAND_OVER = "hand_over"  # a finish reason: the sequence goes on elsewhere; it keeps its pages here until they are copied


class BrokenPolicyError(RuntimeError):
    """A policy broke a rule of the seam: names the policy, the step and the rule."""


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
        self.max_in_flight = max_in_flight
        self.steps = 0
        self.in_flight = 0
        self.preemptions = 0
        self.submitted = 0
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
        self._plans: list[BatchPlan] = []  # in flight, the oldest first
        self.landed: deque[Sequence] = deque()  # sequences whose KV has arrived and that wait for a seat
        self.parked = 0  # sequences that hold pages but no seat
        self._capped: list[tuple[int, int, int, Sequence]] = []  # when each decode will have all the tokens it may generate
        self._speculates = policies.speculation is not None
        self._builder = PlanBuilder(self)
        self._observers = policies.observers()

    # -- requests -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> Sequence | str:
        """Queue ``request`` and return its sequence, or return the name of the limit for which it is refused."""
        self.now_s = now_s
        refusal = self.policies.admission.admit(request, self)
        if refusal is not None:
            return refusal
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is here already")
        self.submitted += 1
        named = self.pool.prefix_caching and (request.prefix_hashes or request.generated_hash_seed is not None)
        keys = request.prefix_hashes if named else None
        seq = Sequence(request, self.policies.ordering.key(request, self), keys, self.pool.root)
        self._live[request.request_id] = seq
        self._enqueue(seq)
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
        undelivered = self._withdraw(seq)
        if seq.state == WAITING:
            self.waiting_count -= 1
        else:
            if seq.state == PARKED:
                self.parked -= 1
            else:
                self.leave(seq, self.clock)
                self._publish_all(seq)
            self.pool.release(seq)
        seq.generated -= undelivered
        self._end(seq, now_s, "aborted")
        return seq

    def _withdraw(self, seq: Sequence) -> int:
        """Note in the plans in flight that nobody waits for the tokens of ``seq`` any more; returns how many those are."""
        tokens = 0
        for plan in self._plans:
            if seq in plan.completing:
                plan.completing.remove(seq)
                tokens += 1
            elif seq in plan.departed or self._decodes_in(plan, seq):
                plan.withdrawn += 1
                tokens += 1
        return tokens

    def _decodes_in(self, plan: BatchPlan, seq: Sequence) -> bool:
        return bool(plan.decodes) and seq.state == DECODING and seq.entry_clock < plan.clock

    def is_under_way(self, seq: Sequence) -> bool:
        """Whether waiting ``seq`` was evicted while a plan still in flight produces its next token, which may be its last."""
        return any(seq in plan.departed or seq in plan.completing for plan in self._plans)

    def _depart(self, seq: Sequence) -> None:
        """Note in the plans in flight that ``seq``, which decodes in them, no longer will when their results come."""
        for plan in self._plans:
            if self._decodes_in(plan, seq):
                plan.departed = [*plan.departed, seq]

    # -- KV that comes from or goes to another replica --------------------------------------------------------------------

    def reserve(self, request: Request, generated: int, now_s: float) -> Sequence | None:
        """Set pages aside for a request whose KV (of its prompt) will be copied here; None when they are not free now.

        What the prefix cache holds of the prompt is shared: ``computed - shared_blocks * block_tokens`` tokens remain to be copied.
        """
        self.now_s = now_s
        keys = request.prefix_hashes if request.prefix_hashes and self.pool.prefix_caching else None
        need = self.pool.blocks_for(request.prompt_tokens)
        hit = self.pool.match(keys, request.prompt_tokens // self.pool.block_tokens) if keys is not None else None
        if need + (hit.idle_blocks - hit.blocks if hit is not None else 0) > self.pool.free:
            return None
        self.submitted += 1
        seq = Sequence(request, self.policies.ordering.key(request, self), keys, self.pool.root)
        seq.state = PARKED
        seq.generated = generated
        if hit is not None and hit.blocks:
            self.pool.share(seq, hit)
        self.pool.take(need - seq.shared_blocks)
        seq.computed = request.prompt_tokens
        self._live[request.request_id] = seq
        self.parked += 1
        return seq

    def land(self, seq: Sequence) -> None:
        """The KV of reserved ``seq`` has arrived: it decodes as soon as there is a seat."""
        if seq.state == PARKED:
            if seq.keys is not None:
                full = min(seq.computed // self.pool.block_tokens, len(seq.keys))
                if full > seq.shared_blocks:
                    self.pool.publish(seq, seq.keys[seq.shared_blocks : full])
            self.landed.append(seq)

    def release_parked(self, seq: Sequence, now_s: float) -> None:
        """The KV of ``seq`` has been copied out: its pages are free (their content stays cached) and it is gone from here."""
        if seq.state == PARKED:
            self.parked -= 1
            self.pool.release(seq)
            self._end(seq, now_s, "handed_over")

    def cached_tokens(self, request: Request) -> int:
        """Prompt tokens of ``request`` that the prefix cache holds now (for ordering and routing policies)."""
        keys = request.prefix_hashes
        if not keys or not self.pool.prefix_caching:
            return 0
        return self.pool.match(keys, (request.prompt_tokens - 1) // self.pool.block_tokens).blocks * self.pool.block_tokens

    # -- steps ----------------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> BatchPlan:
        """Plan the next step. An empty plan means that there is nothing to do before ``plan.ask_again_s`` or an arrival."""
        if self.in_flight >= self.max_in_flight:
            raise RuntimeError(f"{self.in_flight} plans are in flight already; commit one first")
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
                self._plans.append(plan)
                self.in_flight += 1
                self.steps += 1
                return plan
            made_room = len(plan.preempted) + len(plan.ended)
            if made_room > (0 if earlier is None else len(earlier.preempted) + len(earlier.ended)):
                if self.in_flight:
                    return plan  # what is in flight may have been the last of those who gave way: wait for it
                earlier = plan  # it only made room: plan again with it, and answer for both
                continue
            if self.running.count and not self.in_flight:
                raise BrokenPolicyError(
                    f"batching policy {type(self.policies.batching).__name__}, step {plan.step}: sequences run but the plan is empty"
                )
            if self.waiting_count and not self.in_flight and not self.parked and not plan.ask_again_s > now_s:
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

    def extend(self, plan: BatchPlan, more: int) -> None:
        """Apply ``more`` further steps of a decode-only plan (``steps_possible`` allows them) as if each had been planned."""
        width = self.pool.block_tokens
        rounds, rest = divmod(more, width)
        need = rounds * self.decoding
        for offset in range(rest):
            need += self.phases[(self.clock + offset) % width]
        if need:
            self.pool.take(need)
        self.clock += more
        self.context += more * self.decoding
        self.steps += more
        plan.steps += more
        plan.clock += more

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Take in the result of the oldest plan in flight: cache entries, first tokens, finishes (in the order given)."""
        if not self._plans or self._plans.pop(0) is not plan:
            raise RuntimeError(f"plan {plan.step} is not the oldest in flight")
        self.in_flight -= 1
        end_s = result.end_s
        if plan.chunks:
            self._publish_chunks(plan)
            if self.pool.lower is not None:
                self._note_prefill(plan, end_s)
        if plan.decodes:
            self.decoded_s = end_s
            if plan.speculating:
                commit_accepted(self, plan, result.tokens)
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
                    seq.state = PARKED
                    self.parked += 1
                    continue
                self.pool.release(seq)
            self._end(seq, end_s, reason)

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
        if not self._speculates:
            self.phases[(clock - seq.computed) % self.pool.block_tokens] += 1
        self.decoding += 1
        self.context += seq.computed
        if self.max_in_flight > 1:
            last_clock = clock + seq.request.max_output_tokens - seq.generated
            heappush(self._capped, (last_clock, seq.request_id, seq.preemptions, seq))

    def drain_capped(self) -> None:
        """With plans in flight whose tokens are not known yet: stop decoding sequences that are at their token limit already."""
        capped = self._capped
        while capped and capped[0][0] <= self.clock:
            _, _, preemptions, seq = heappop(capped)
            if seq.preemptions == preemptions and seq.state == DECODING:
                self._depart(seq)
                self._stop_decoding(seq)
                seq.state = DRAINING

    def computed_at(self, seq: Sequence, clock: int) -> int:
        """KV entries of decoding ``seq`` once the decode step numbered ``clock`` has run."""
        return seq.computed if self._speculates else seq.computed + clock - seq.entry_clock

    def settle(self, seq: Sequence) -> None:
        """Bring the counters of a decoding sequence up to the decode clock."""
        if self._speculates:
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
            if not self._speculates:
                seq.generated -= ahead
        elif seq.state == PREFILLING:
            self.partials.remove(seq)

    def _stop_decoding(self, seq: Sequence) -> None:
        under_way = sum(self._decodes_in(plan, seq) for plan in self._plans) if self._plans else 0
        if self.decoded_s > seq.token_s and self.clock - seq.entry_clock > under_way:
            seq.token_s = self.decoded_s
        self.settle(seq)
        if not self._speculates:
            self.phases[(self.clock - seq.computed) % self.pool.block_tokens] -= 1
        self.decoding -= 1
        self.context -= seq.computed

    def preempt(self, seq: Sequence) -> None:
        """Evict a running sequence: its pages are released (their content stays cached), it waits to be recomputed."""
        self._depart(seq)
        self.leave(seq, self.clock)
        if self.pool.prefix_caching:
            if seq.keys is None and seq.computed >= self.pool.block_tokens:
                # Content that nobody else can name is still worth finding again: give it a name of its own.
                own = ("own", seq.request_id)
                seq.keys = tuple((own, index) for index in range(seq.request.prompt_tokens // self.pool.block_tokens))
            self._publish_all(seq)
        self.pool.release(seq)
        seq.computed = 0
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
        self._end(seq, now_s, "kv_capacity")

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

    def _end(self, seq: Sequence, now_s: float, status: str) -> None:
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
        return bool(self.waiting_count or self.running.count or self.landed)

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
        return self.pool.blocks_for(self.running.computed(seq)) - seq.shared_blocks

    def check(self) -> None:
        """Raise AssertionError unless the aggregate, the queues and the pool agree with the sequences."""
        decoding = [(seq, self.computed_at(seq, self.clock)) for seq in self.running if seq.state == DECODING]
        assert len(decoding) == self.decoding
        assert self.context == sum(computed for _, computed in decoding)
        phases = [0] * self.pool.block_tokens
        for _, computed in () if self._speculates else decoding:
            phases[(self.clock - computed) % self.pool.block_tokens] += 1
        assert phases == self.phases
        assert sorted(id(s) for s in self.partials) == sorted(id(s) for s in self.running if s.state == PREFILLING)
        assert self.waiting_count == sum(seq.state == WAITING for seq in self._live.values())
        parked = [seq for seq in self._live.values() if seq.state == PARKED]
        assert len(parked) == self.parked
        assert len(self._live) == self.waiting_count + len(self.running) + self.parked
        self.pool.check((seq, self.running.computed(seq)) for seq in [*self.running, *parked])
