"""One replica: it drives the shared scheduler with priced steps instead of executed ones.

A replica is lazy: ``advance(until_s)`` does what would have happened by then. Steps that a plan promises to repeat are priced
and committed as one run, which ends at the first step that could matter to anybody. A submission cuts the run in flight
behind the step that is being executed, so that it is seen by exactly the steps that start at or after it. ``stepwise`` takes
the steps one at a time: same times, same plans, bit for bit.

Where two plans may be in flight (an engine that schedules ahead), the next step is planned when the present one starts, so what
happens meanwhile is seen one step later; such steps are taken one at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from serving.plan import BatchPlan, StepResult
from serving.request import Arrival, Request
from serving.scheduler import HAND_OVER, Scheduler
from serving.sequence import DECODING, Sequence
from sim.accounts import PageAccount, RowWriter, TokenGaps
from sim.audit import Audit
from sim.drafts import DraftAccount
from sim.oracle import Oracle
from sim.tenancy import Crowded

if TYPE_CHECKING:
    import numpy as np

    from hwmodels.latency import LatencyModel
    from serving.metrics import Metrics
    from serving.recording import Recording

LOOK_AHEAD = 256  # decode steps priced at once; limits work, not results


class Replica:
    """``on_finish(request_id, time_s, status)`` is called when a request leaves, in this replica's time order."""

    def __init__(
        self,
        index: int,
        scheduler: Scheduler,
        latency: LatencyModel,
        metrics: Metrics,
        *,
        label: int | None = None,
        stepwise: bool = False,
        audit: np.random.Generator | None = None,
        audit_share: float = 0.0,
        recording: Recording | None = None,
        acceptance: float = 0.0,
        draft_rng: np.random.Generator | None = None,
    ) -> None:
        self._speculates = scheduler.policies.speculation is not None
        self._acceptance, self._draft_rng = acceptance, draft_rng
        self.index = index
        self.label = index if label is None else label  # its number in records, unique in the whole fleet
        self.scheduler = scheduler
        self.oracle = Oracle(acceptance, draft_rng)
        self.drafts = DraftAccount()
        self.recording = recording
        self.on_finish: Callable[[int, float, str], None] | None = None
        # A replica that only prefills asks whether a sequence goes on elsewhere after its first token, and hands it over.
        self.goes_on: Callable[[Sequence], bool] | None = None
        self.on_hand_over: Callable[[Replica, Sequence, float], None] | None = None
        self.entropy: Iterator[float] | None = None  # attention entropy of one decode after the other, where somebody asks
        self.on_record: Callable[[Sequence, float, str], None] | None = None  # as on_finish, with the whole sequence
        self.take_back: Callable[[Replica, Request, int, str], bool] | None = None
        self.next_s = math.inf  # the next instant at which advance() has something to do
        self.finished_prompt_tokens = 0  # of requests that left; whoever reads it keeps its own last reading
        self.idle_s = 0.0
        self.pages, self.gaps = PageAccount(), TokenGaps(metrics)
        self.prompt_tokens = self.cached_tokens = 0
        self.runs = 0  # plans priced, a run of many steps counting once
        self.last_end_s = 0.0
        self.latency = latency
        self._earlier_steps = self._earlier_preemptions = 0  # of schedulers that were lost
        self._price, self._price_run = latency.step_s, latency.run_s
        self._metrics = metrics
        self._rows = RowWriter(metrics, self.label)
        self._pipelined = scheduler.flight.limit > 1
        self._stepwise = stepwise or self._pipelined or (recording is not None and recording.every_step)
        self._audit = None if audit is None else Audit(audit_share, audit)
        self._start_s = math.inf  # when the next plan is due, if none is in flight
        self._idle_from_s = 0.0
        self._plan: BatchPlan | None = None
        self._queued: BatchPlan | None = None  # planned ahead of the one in flight, when plans are pipelined
        self._queued_s = 0.0  # what that plan costs
        self._run_start_s = 0.0
        self._ends: list[float] = []
        self._durations: list[float] = []
        self._latest_duration_s = 1.0  # a guess at the next step's, to choose how far to look ahead

    # -- requests -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, output_tokens: int, now_s: float) -> bool:
        """Queue a request that will generate ``output_tokens``; False when it is refused."""
        self._catch_up(now_s)
        seq = self.scheduler.submit(request, now_s)
        if isinstance(seq, str):
            self.refuse(request, now_s, seq, output_tokens)
            return False
        cap = request.max_output_tokens
        self.oracle.expect(request.request_id, output_tokens if output_tokens < cap else cap)
        if self.recording is not None:
            self.recording.submitted(self.label, request.request_id)
        return True

    def reserve(self, request: Request, generated: int, now_s: float) -> Sequence | None:
        """Set pages aside for a request whose KV will be copied here; None when they are not free now."""
        self._catch_up(now_s)
        return self.scheduler.landing.reserve(request, generated, now_s)

    def land(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """The KV of reserved ``seq`` has arrived; it goes on until ``output_tokens`` are generated, those before included."""
        self._catch_up(now_s)
        self.oracle.expect(seq.request_id, min(output_tokens, seq.request.max_output_tokens))
        self.scheduler.landing.land(seq)

    def release_parked(self, seq: Sequence, now_s: float) -> None:
        """The KV of ``seq`` has been copied out of here."""
        self._catch_up(now_s)
        self.finished_prompt_tokens += seq.request.prompt_tokens
        self.scheduler.landing.release(seq, now_s)

    def abort(self, request_id: int, now_s: float) -> bool:
        """Drop a request in whatever state it is; False when it is not here any more."""
        self._catch_up(now_s)
        plan = self._plan
        withdrawn = 0 if plan is None else plan.withdrawn
        seq = self.scheduler.abort(request_id, now_s)
        if seq is None:
            return False
        self.gaps.aborted(seq, plan is not None and plan.withdrawn > withdrawn)
        if self.recording is not None:
            self.recording.aborted(self.label, request_id)
        self.oracle.forget(request_id)
        self._record(seq, now_s, "aborted")
        return True

    # -- faults ---------------------------------------------------------------------------------------------------------

    def slow_down(self, factor: float, now_s: float, added_s: float = 0.0) -> None:
        """Steps that start from now on take ``factor`` times as long as the latency model says, plus ``added_s``; 1 and 0 restore it."""
        self._catch_up(now_s)
        latency = self.latency if factor == 1.0 and not added_s else Crowded(self.latency, factor, added_s)
        self._price, self._price_run = latency.step_s, latency.run_s

    def stall(self, seconds: float, now_s: float) -> None:
        """The step being executed ends later; nothing happens to an idle replica."""
        self._catch_up(now_s)
        if self._plan is not None:
            self._durations[-1] += seconds
            self._ends[-1] += seconds
            self.next_s = self._ends[-1]

    def lose(self, scheduler: Scheduler, now_s: float) -> list[Arrival]:
        """The process is gone with all it held and starts over with an empty ``scheduler``; returns the requests that were here.

        A request whose KV was being copied comes back with 0 output tokens: its length is known to whoever has it copied.
        """
        self._catch_up(now_s)
        if self._plan is not None:
            self._salvage(self._plan, now_s)
        lost = [Arrival(seq.request, self.oracle.output_tokens(seq.request_id)) for seq in self.scheduler.live()]
        self.finished_prompt_tokens += sum(request.prompt_tokens for request, _ in lost)
        self._earlier_steps += self.scheduler.steps
        self._earlier_preemptions += self.scheduler.preemptions
        self.scheduler, self.oracle = scheduler, Oracle(self._acceptance, self._draft_rng)
        self._plan = self._queued = None
        if self._audit is not None:
            self._audit.forget()
        self.gaps.clear()
        self.last_end_s = max(self.last_end_s, now_s) if lost else self.last_end_s
        if self._idle_from_s == math.inf:
            self._idle_from_s = now_s
        self._start_s = self.next_s = math.inf
        return lost

    def _salvage(self, plan: BatchPlan, now_s: float) -> None:
        """The steps of the run in flight that ended before ``now_s`` gave their tokens to somebody; the one being executed gives none."""
        done = bisect_left(self._ends, now_s)
        if not done:
            return
        durations, ends = self._durations[:done], self._ends[:done]
        plan.withdrawn = 0  # who gave up did so in the step that is lost
        self.gaps.decoded(plan, self.scheduler.decoded_s, self._run_start_s, durations, ends)
        self.last_end_s = ends[-1]
        if self.recording is not None:
            plan.steps = done
            self.recording.step(self.label, plan, self._run_start_s, ends[-1], self.pages.used_blocks, [])

    @property
    def steps(self) -> int:
        """Steps planned so far, by processes that were lost too."""
        return self._earlier_steps + self.scheduler.steps

    @property
    def preemptions(self) -> int:
        """Preemptions so far, by processes that were lost too."""
        return self._earlier_preemptions + self.scheduler.preemptions

    def _catch_up(self, now_s: float) -> None:
        """Something is about to change: commit what has ended, cut the run in flight behind the step that is being executed."""
        if self.next_s < now_s:
            self.advance(now_s)
        if self._audit is not None:
            self._audit.forget()
        if self._plan is None:
            if self._start_s > now_s:
                self._start_s = self.next_s = now_s
        elif len(self._ends) > 1:
            begun = bisect_left(self._ends, now_s) + 1
            del self._ends[begun:], self._durations[begun:]
            self.next_s = self._ends[-1]
            self._apply(executing=True)

    # -- time -----------------------------------------------------------------------------------------------------------

    def advance(self, until_s: float) -> None:
        """Commit all that ends before ``until_s`` and plan what starts before it. A run that reaches beyond it stays in flight:
        only its last step can end a request, so nothing that anybody could see is withheld.
        """
        while self.next_s < until_s:
            if self._plan is None:
                self._begin(until_s)
            else:
                self._commit()

    def wake(self, now_s: float) -> None:
        """For whoever must see finishes in time: commit the run that ends now, or plan the step that is due now.

        The two are separate so that what a finish causes at this instant arrives before the next step is planned.
        """
        if self._plan is not None:
            if self._ends[-1] <= now_s:
                self._commit()
                if self._audit is not None and self._audit.waiting:  # it ended the run early: take its rest
                    self.advance(now_s)
        elif self._start_s <= now_s:
            self._begin(math.inf)

    @property
    def executing(self) -> bool:
        """Whether a plan is in flight; ``next_s`` is then when its run ends, else when the next plan is due."""
        return self._plan is not None

    def busy_until(self, end_s: float) -> float:
        """Seconds of steps from time zero to ``end_s``, the end of the run."""
        return end_s - self.idle_s - (max(0.0, end_s - self._idle_from_s) if self._idle_from_s < math.inf else 0.0)

    def _begin(self, until_s: float) -> None:
        start_s = self._start_s
        scheduler = self.scheduler
        plan = self._queued or self._schedule(start_s)
        if not plan.decodes and not plan.chunks:
            if self._idle_from_s == math.inf:
                self._idle_from_s = start_s
            # With requests queued, either the policy says when to ask again or pages that are being copied out will be an event.
            self._start_s = self.next_s = plan.ask_again_s if scheduler.waiting_count and plan.ask_again_s > start_s else math.inf
            self._close(plan)
            return
        if self._idle_from_s != math.inf:
            self.idle_s += start_s - self._idle_from_s
            self._idle_from_s = math.inf
        if self._pipelined:  # priced when planned: once the next plan is made, the sequences of this one have moved on
            duration_s = self._price(plan) if self._queued is None else self._queued_s
            following = self._schedule(start_s)
            if following.empty:
                self._close(following)
            self._queued = None if following.empty else following
            self._queued_s = 0.0 if following.empty else self._price(following)
        self._plan = plan
        self._run_start_s = start_s
        self.pages.begin(scheduler.pool.total - scheduler.pool.free)
        self.runs += 1
        if plan.valid_until_s > start_s and not self._stepwise:
            self._price_steps(plan, start_s, until_s)
        else:
            if not self._pipelined:
                duration_s = self._price(plan)
            if plan.loads:  # pages are read while the step computes what does not need them: it ends with the later of the two
                duration_s = max(duration_s, scheduler.pool.lower.load_s(plan.loads))
            self._durations = [duration_s]
            self._ends = [start_s + duration_s]
        self.next_s = self._ends[-1]

    def _schedule(self, now_s: float) -> BatchPlan:
        plan = self.scheduler.schedule(now_s)
        if self._audit is not None:
            self._audit.check(plan)
        if plan.landed:
            for seq in plan.landed:
                self.oracle.joined(seq)
            self.gaps.fresh(plan.landed)
        if plan.admitted:
            for seq, (_, cached) in zip(plan.prefills, plan.chunks):
                if seq in plan.admitted:
                    self.prompt_tokens += seq.known_tokens - (seq.state == DECODING)
                    self.cached_tokens += cached
        if self.recording is not None and not plan.empty:
            self.recording.planned(self.label, plan)
        if plan.ended and not plan.empty:
            self._close(plan)
        return plan

    def _close(self, plan: BatchPlan) -> None:
        """Tell of those that hit the wall of the pool; whoever hears of it may submit at once."""
        for seq in plan.ended:
            self.oracle.forget(seq.request_id)
            self._record(seq, plan.now_s, "kv_capacity")

    def _price_steps(self, plan: BatchPlan, start_s: float, until_s: float) -> None:
        """Price the steps that the plan may stand for: up to a finish, a shortage of blocks, its validity, or the horizon."""
        limit = self.oracle.steps_to_next_finish(plan.clock - 1)
        limit = min(limit, LOOK_AHEAD)
        if until_s < math.inf:
            limit = min(limit, int((until_s - start_s) / self._latest_duration_s) + 2)
        if limit > 1:
            limit = self.scheduler.steps_possible(plan, limit)
        self._durations = durations = self._price_run(plan, limit)
        instants = accumulate(durations, initial=start_s)
        next(instants)
        self._ends = ends = list(instants)
        if ends[-1] > plan.valid_until_s:
            keep = bisect_left(ends, plan.valid_until_s) + 1  # a step counts by when it starts
            del ends[keep:], durations[keep:]

    def _apply(self, executing: bool = False) -> None:
        """Account for the steps of the run in flight (but not yet for the last if that is ``executing``: it may still be stalled
        or lost) and let the scheduler take blocks for all of them.
        """
        plan, steps = self._plan, len(self._ends)
        self.pages.add(self.scheduler, plan, self._durations, steps - executing)
        if steps > plan.steps:
            self.scheduler.extend(plan, steps - plan.steps, self.pages.used_blocks - self.pages.first_blocks)

    def _commit(self) -> None:
        """Commit the run in flight."""
        plan, ends, durations = self._plan, self._ends, self._durations
        if self._audit is not None:
            self._audit.cut(plan, ends, durations)
        self._apply()
        scheduler = self.scheduler
        end_s = ends[-1]
        if not plan.chunks:
            self._latest_duration_s = durations[-1]
        gaps = self.gaps
        if plan.decodes:
            gaps.decoded(plan, scheduler.decoded_s, self._run_start_s, durations, ends)
        elif plan.completing:
            gaps.fresh(plan.completing)
        if plan.completing:
            gaps.recomputed(plan.completing, end_s)
        tokens = None
        if self._speculates:
            tokens = self.oracle.accepted(plan)
            finished = self.oracle.finished_speculating(plan, tokens)
            if plan.query_tokens_per_decode > 1:
                self._metrics.itl([0.0], [self.drafts.note(plan, durations[0], tokens, self._price)], [end_s])
        else:
            finished = self.oracle.finished(plan)
        if finished and self.on_hand_over is not None:
            finished = [(seq, HAND_OVER if self.goes_on(seq) else reason) for seq, reason in finished]
        if self._pipelined:
            gaps.lost_decodes = sum(seq.state == DECODING for seq, _ in finished) if self._queued and self._queued.decodes else 0
        scheduler.commit(plan, StepResult(end_s, finished, tokens, self.entropy and {seq: next(self.entropy) for seq in plan.speculating}))
        if self.recording is not None:
            self.recording.step(self.label, plan, self._run_start_s, end_s, self.pages.used_blocks, finished)
        self._plan = None
        self._start_s = self.next_s = self.last_end_s = end_s
        if not scheduler.has_work and self._queued is None:  # a plan made ahead is on its way, even if nobody waits for it any more
            self._idle_from_s = end_s
            self._start_s = self.next_s = math.inf
        for seq, reason in finished:
            if reason == HAND_OVER:
                self.on_hand_over(self, seq, end_s)
            else:
                self._record(seq, end_s, reason)

    def _record(self, seq: Sequence, now_s: float, reason: str) -> None:
        self.finished_prompt_tokens += seq.request.prompt_tokens
        self._rows.left(seq, now_s, reason)
        if self.on_record is not None:
            self.on_record(seq, now_s, reason)
        if self.on_finish is not None:
            self.on_finish(seq.request_id, now_s, reason)

    def refuse(self, request: Request, now_s: float, limit: str, output_tokens: int = 0) -> None:
        """Record that ``request`` was turned away at ``limit``, unless its client takes it back to try again."""
        self.finished_prompt_tokens += request.prompt_tokens
        if self.take_back is not None and self.take_back(self, request, output_tokens, limit):
            return
        self._rows.refused(request, now_s)
        if self.on_finish is not None:
            self.on_finish(request.request_id, now_s, f"rejected: {limit}")
