"""The engine's loop: it drives the shared scheduler with executed steps instead of priced ones.

    live through what is due -> commit the oldest step in flight -> schedule -> launch -> collect

One instant is read per step, when its tokens have arrived: the step ends then and the next begins then. Whatever came meanwhile is
submitted first, each at its own instant, as the simulator does; so the same durations give the same decisions (``engine.clocks``).
With ``max_in_flight`` 2 the scheduler plans, and the runner launches, one step ahead of the tokens.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.clocks import Clock
from engine.drafted import Drafted
from engine.drafting import Proposer
from engine.flight import Decoding, Flight
from engine.lora.residents import Residents
from engine.messages import Left, Observer, Step, Submission
from engine.prompts import Prompts
from engine.step import StepInput, StepOutput
from engine.streams import Decodes, Stream, chunk_entries
from engine.timeline import Timeline
from engine.trials import run_one_by_one
from serving.kv_tiers import Move
from serving.plan import BatchPlan
from serving.request import Request
from serving.scheduler import Scheduler


class StepRunner(Protocol):
    """What executes steps: ``engine.runner.Runner``, or a stand-in."""

    def launch(self, batch: StepInput) -> object:
        """Issue a step."""

    def collect(self, step: object) -> StepOutput:
        """Wait for its tokens. Steps are collected in the order of their launch."""


class Loop:
    """One engine: a scheduler on a pool with named blocks, a runner, a clock. One thread drives it; ``offer`` and ``abort`` are for any thread.

    As a fleet of one (``env``, ``submit``, ``on_outcome``) it takes the same clients as the simulator.
    ``on_tokens(end_s, tokens by request, requests that left)`` is called once a step with all that it produced.
    """

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, clock: Clock, prompts: Prompts, *, observer: Observer | None = None,
        on_tokens: Callable[[float, Mapping[int, tuple[int, ...]], list[Left]], None] | None = None, proposer: Proposer | None = None,
    ) -> None:  # fmt: skip
        """``proposer`` makes the drafts of a scheduler that speculates."""
        self.scheduler = scheduler
        self.env = Timeline(clock.now_s)
        self.streams: dict[int, Stream] = {}
        self._runner = runner
        self._clock = clock
        self._prompts = prompts
        self._observer = observer
        self._on_tokens = on_tokens
        self._watchers: list[Callable[[int, float, str], None]] = []
        policies = scheduler.policies
        self._residents = None if policies.adapters is None else Residents(policies.adapters)
        self._decodes: Decoding = (
            Decodes(scheduler.pool, ahead=scheduler.flight.limit > 1, retains=policies.retention is not None, adapted=policies.adapters is not None)
            if proposer is None else Drafted(scheduler.pool, proposer)
        )  # fmt: skip
        self._flights: deque[Flight] = deque()
        self._released: list[int] = []
        self._left: list[Left] = []
        self._open = False
        self._events = 0  # submissions, refused ones included, and aborts since the latest plan
        self._events_before_commits: list[int] = []
        self._mark_s = 0.0  # when the tokens of the latest step arrived, by the host's clock

    # -- for any thread -------------------------------------------------------------------------------------------------

    def offer(self, submission: Submission) -> None:
        """Queue a request as of now (its ``arrival_s`` is set). It is refused, served, or fails: ``on_tokens`` tells."""

        def arrive(_: object) -> None:
            request = submission.request._replace(arrival_s=self.env.now)
            self.submit_prompt(submission._replace(request=request))

        self.env.hand_in(arrive)

    def abort(self, request_id: int) -> None:
        """Drop a request as of now; one that has left already is ignored."""
        self.env.hand_in(lambda _: self.drop(request_id))

    def stop(self) -> None:
        """Let ``run(forever=True)`` return once everything queued by now is served."""

        def close(_: object) -> None:
            self._open = False

        self.env.hand_in(close)

    # -- a fleet of one, for clients in the engine's thread ----------------------------------------------------------------

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves."""
        self._watchers.append(watcher)

    def submit(self, request: Request, output_tokens: int) -> None:
        """Queue a request of a scenario now: its prompt is made up, its length is pinned."""
        self.submit_prompt(Submission(request, [], output_tokens))

    def drop(self, request_id: int) -> None:
        """Abort a request now."""
        now_s = self.env.now
        seq = self.scheduler.abort(request_id, now_s)
        if seq is None:
            return
        self._take_out(request_id)
        self._events += 1
        if self._observer is not None:
            self._observer.aborted(request_id)
        self._leave(Left(seq.request, seq, now_s, "aborted"))

    def submit_prompt(self, submission: Submission) -> None:
        """Queue a request with its prompt now."""
        request, now_s = submission.request, self.env.now
        self._events += 1
        seq = self.scheduler.submit(request, now_s)
        if isinstance(seq, str):
            self._leave(Left(request, None, now_s, "rejected", seq))
            return
        limit = request.max_output_tokens
        if submission.output_tokens is not None:
            limit = min(limit, submission.output_tokens)
        stream = Stream(
            request, submission.prompt or self._prompts.tokens(request), limit=limit,
            stop_tokens=submission.stop_tokens if submission.output_tokens is None else frozenset(), sampling=submission.sampling,
        )  # fmt: skip
        stream.seq = seq
        self.streams[request.request_id] = stream
        if self._observer is not None:
            self._observer.submitted(request.request_id)

    # -- the loop -------------------------------------------------------------------------------------------------------

    def run(self, *, forever: bool = False) -> float:
        """Serve until nothing is due and nothing waits (``forever``: until ``stop``). Returns the instant of the end, seconds.

        Raises whatever the runner raises when no sequence can be executed any more, and BrokenPolicyError.
        """
        self._open = forever
        self._clock.start()
        self._mark_s = time.perf_counter()
        now_s = self.env.now
        while True:
            self._deliver(now_s, {})
            ask_s = self._fill(now_s)
            if self._flights:
                now_s = self._finish_step(now_s)
                continue
            due_s = min(ask_s, self.env.next_s())
            if due_s == math.inf and not self._open:
                self._give_rows_back()
                return now_s
            self._clock.wait(due_s, self.env)
            due_s = min(ask_s, self.env.next_s())
            if due_s < math.inf:
                now_s = max(now_s, due_s)
                self.env.run_until(now_s)

    def _give_rows_back(self) -> None:
        """Tell the runner who left with the last step: another loop may use it next."""
        if self._released:
            self._runner.collect(self._runner.launch(StepInput([], tuple(self._released))))
            self._released.clear()

    def _fill(self, now_s: float) -> float:
        """Plan and launch as many steps as may be in flight. Returns when the policy wants to be asked again if nothing is."""
        scheduler = self.scheduler
        ask_s = math.inf
        while len(self._flights) < scheduler.flight.limit and scheduler.has_work:
            plan = scheduler.schedule(now_s)
            for seq in plan.ended:
                self._take_out(seq.request_id)
                self._leave(Left(seq.request, seq, now_s, "kv_capacity"))
            for seq in plan.preempted:  # a plan that only makes room is empty
                self._decodes.remove(seq.request_id)
                self._released.append(seq.request_id)
            if plan.empty:
                if scheduler.waiting_count and plan.ask_again_s > now_s:
                    ask_s = plan.ask_again_s
                break
            self._launch(plan)
        return ask_s

    def _launch(self, plan: BatchPlan) -> None:
        begin = time.perf_counter()
        decodes, pool = self._decodes, self.scheduler.pool
        if self._observer is not None:
            self._observer.planned(plan)
        if plan.decodes and plan.decodes != len(decodes.ids):
            decodes.drop_drained()
        adapters = self._seat_adapters(plan) if self._residents is not None and plan.admitted else ()
        entries = decodes.entries(plan) if plan.decodes else []
        flight = Flight(plan, decodes, entries, [self.streams[seq.request_id] for seq in plan.completing])
        beside = len(entries) if plan.streams == 2 and entries and plan.chunks else None
        entries = entries + chunk_entries(plan, self.streams, pool)
        for stream in flight.completing:
            decodes.add(stream)
        flight.batch = StepInput(entries, tuple(self._released), self._moves(plan), adapters, beside)
        flight.used_blocks = pool.total - pool.free
        flight.events_before_commits, self._events_before_commits = self._events_before_commits, []
        self._released.clear()
        self._events = 0
        flight.schedule_s = begin - self._mark_s
        self._mark_s = time.perf_counter()
        flight.prepare_s = self._mark_s - begin
        self._flights.append(flight)
        try:
            flight.launched = self._runner.launch(flight.batch)
        except Exception as error:  # whatever a kernel or a third party's back end raises: find the request at fault
            flight.launched = run_one_by_one(self._runner, flight.batch, error)

    def _seat_adapters(self, plan: BatchPlan) -> list[tuple[int, str]]:
        """Tell the newcomers the slots of their adapters; returns which adapters must be copied into which."""
        fresh = self._residents.refresh() if plan.adapter_loads else []
        for seq in plan.admitted:
            self.streams[seq.request_id].adapter = self._residents.slot(seq.request.adapter)
        return fresh

    def _moves(self, plan: BatchPlan) -> list[Move]:
        """Pages to copy before the step: those evicted since the last one, then those that it reads back (their blocks are named by now)."""
        lower = self.scheduler.pool.lower
        if lower is None:
            return []
        moves = lower.take_moves()
        for seq, first, keys in plan.reloads:
            moves += [Move("in", key, block) for key, block in zip(keys, seq.table[first : first + len(keys)])]
        return moves

    def _collect(self, flight: Flight) -> StepOutput:
        if isinstance(flight.launched, StepOutput):
            return flight.launched
        try:
            return self._runner.collect(flight.launched)
        except Exception as error:
            return run_one_by_one(self._runner, flight.batch, error)

    def _finish_step(self, begin_s: float) -> float:
        """Wait for the oldest step in flight, commit it as of its end, which is returned."""
        flight = self._flights.popleft()
        output = self._collect(flight)
        lap = self._clock.lap(begin_s, output)
        self._mark_s = time.perf_counter()
        end_s = begin_s + lap.duration_s
        self.env.run_until(end_s)
        self._events_before_commits.append(self._events)
        gaps_s = flight.take_tokens(output, end_s, ahead=self.scheduler.flight.limit > 1)
        finished = flight.finished(self.streams, output)
        self.scheduler.commit(flight.plan, flight.result(output, end_s, finished))
        if self._observer is not None:
            self._observer.stepped(
                Step(
                    flight.plan, begin_s, end_s, *lap, flight.schedule_s, flight.prepare_s, output, flight.used_blocks,
                    flight.events_before_commits, finished, gaps_s, (flight.drafts, flight.tested),
                )
            )  # fmt: skip
        for seq, reason in finished:
            self._prompts.remember(seq.request, self.streams[seq.request_id].tokens)
            self._take_out(seq.request_id)
            self._leave(Left(seq.request, seq, end_s, reason, output.errors.get(seq.request_id, "")))
        self._deliver(end_s, flight.tokens)
        self.env.run_until(end_s)  # what the finishes caused at this very instant
        return end_s

    # -- leaving --------------------------------------------------------------------------------------------------------

    def _take_out(self, request_id: int) -> None:
        self._decodes.remove(request_id)
        self._released.append(request_id)
        del self.streams[request_id]

    def _leave(self, left: Left) -> None:
        self._left.append(left)
        if self._observer is not None:
            self._observer.left(left)
        for watcher in self._watchers:
            watcher(left.request.request_id, left.time_s, left.status if left.status != "rejected" else f"rejected: {left.detail}")

    def _deliver(self, end_s: float, tokens: Mapping[int, tuple[int, ...]]) -> None:
        if not tokens and not self._left:
            return
        left, self._left = self._left, []
        if self._on_tokens is not None:
            self._on_tokens(end_s, tokens, left)
