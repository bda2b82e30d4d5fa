"""The engine as a backend of the HTTP server: its loop has a thread of its own, and a step's tokens cross to the event loop together.

Times are read in the engine's thread when the tokens arrive; the event loop, whatever it is busy with, only passes them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Mapping

from engine.clocks import RealClock
from engine.loop import Loop, StepRunner
from engine.messages import Left, Step, Submission
from engine.run import Engine, build_loop
from engine.sampling import SamplingParams
from engine.step import StepInput
from serving.adapters import served_names
from serving.catalog import load_llm
from serving.http.backend import Departure, Generation, ReplicaState, Tokenizer
from serving.http.content_keys import content_keys
from serving.http.delivery import Streams, TokenStream
from serving.http.telemetry import Telemetry
from serving.plan import BatchPlan
from serving.refusal import retry_after_s
from serving.request import Request
from serving.scenario import Scenario
from serving.scheduler import Scheduler
from serving.sequence import DECODING


class EngineBackend:
    """Serves requests with an engine under a scenario's policies (``serving.http.backend.Backend``)."""

    def __init__(self, scenario: Scenario, engine: Engine, tokenizer: Tokenizer, *, end_tokens: frozenset[int] = frozenset()) -> None:
        """``end_tokens`` end an answer unless the request ignores them. Raises InputError for policies that cannot be had."""
        self.llm = load_llm(scenario.llm).name
        self.adapters = served_names(scenario)
        self.max_model_len = engine.max_model_len
        self.tokenizer = tokenizer
        self.streams = Streams(Telemetry(self.llm))
        self._scenario = scenario
        self._engine = engine
        self._end_tokens = end_tokens
        self._events: asyncio.AbstractEventLoop | None = None
        self._problem: str | None = None
        self._swap = threading.Lock()  # held while a request is offered, and while a loop that failed is replaced
        self._counts = Counts()
        self._clock, self._loop = self._new_loop()
        self._classes = {row.priority: row.name for row in reversed(scenario.workload.classes)}
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def _new_loop(self) -> tuple[RealClock, Loop]:
        clock = RealClock()
        return clock, build_loop(self._scenario, self._engine, clock, observer=self._counts, on_tokens=self._hand_over)

    # -- the interface of a backend, in the event loop's thread -----------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve: time zero is now."""
        self._events = asyncio.get_running_loop()
        self._clock, self._loop = self._new_loop()  # what is offered to it is stamped by its clock, which must not be older than its run
        self._thread.start()

    def submit(self, generation: Generation) -> TokenStream:
        """Queue a request that arrives now."""
        with self._swap:
            opened = self.streams.open(self._clock.now_s(), len(generation.prompt))
            cache = self._scenario.kv_cache
            name = self._classes.get(generation.priority, "default")
            request = Request(
                opened.request_id, opened.arrival_s, len(generation.prompt), generation.max_tokens, priority=generation.priority, class_name=name,
                tenant=generation.tenant, ttft_slo_s=self._scenario.slo.targets(name).ttft_s, adapter=generation.adapter,
                prefix_hashes=content_keys(generation.prompt, cache.block_tokens, generation.adapter) if cache.prefix_caching else (),
            )  # fmt: skip
            stops = generation.stop_token_ids if generation.ignore_eos else generation.stop_token_ids | self._end_tokens
            sampling = SamplingParams(generation.temperature, generation.top_p, generation.top_k, generation.seed)
            self._loop.offer(Submission(request, generation.prompt, stop_tokens=stops, sampling=sampling))
        return opened

    def abort(self, request_id: int) -> None:
        """Drop a request as of now."""
        with self._swap:
            self._loop.abort(request_id)

    def stats(self) -> list[ReplicaState]:
        """The engine now: counters that its thread is changing, each of them whole."""
        scheduler = self._loop.scheduler
        usage = 1 - scheduler.pool.free / scheduler.pool.total
        counts = self._counts
        preemptions = counts.earlier_preemptions + scheduler.preemptions
        return [ReplicaState(scheduler.running.count, scheduler.waiting_count, usage, preemptions, counts.prompt_tokens, counts.cached_tokens)]

    def problem(self) -> str | None:
        """Why the engine's thread has ended, if it has."""
        return self._problem

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the loop that serves now."""
        return self._loop.scheduler

    async def close(self) -> None:
        """Serve what is queued and stop."""
        if self._thread.is_alive():
            with self._swap:
                self._loop.stop()
            await asyncio.to_thread(self._thread.join)

    # -- the engine's thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run(forever=True)
                return
            except Exception as error:  # the device, a policy: every sequence that is here is lost
                traceback.print_exception(error, file=sys.stderr)
                if not self._replace(error):
                    return

    def _replace(self, error: Exception) -> bool:
        """Fail what is here and go on with an empty pool; False when even that does not help."""
        detail = f"{type(error).__name__}: {error}"
        with self._swap:
            idle = not self._loop.streams
            before = self.streams.next_id()
            try:
                # Rows of block tables are kept by request: let the runner forget all that the lost loop ever served.
                _forget(self._engine.runner, before)
                self._counts.earlier_preemptions += self._loop.scheduler.preemptions
                self._clock, self._loop = self._new_loop()
            except Exception as again:
                detail, idle = f"{detail}; and then {type(again).__name__}: {again}", True
            if idle:
                self._problem = detail
        self._tell(self.streams.fail, before, self._clock.now_s(), detail)
        return not idle

    def _hand_over(self, end_s: float, tokens: Mapping[int, tuple[int, ...]], left: list[Left]) -> None:
        self._tell(self.streams.deliver, end_s, tokens, [self._departure(each) for each in left])

    def _departure(self, left: Left) -> Departure:
        """Who was refused is told when to come back: asked here, in the thread that the policy lives in."""
        scheduled_s = float("nan") if left.seq is None else left.seq.scheduled_s
        told_s = retry_after_s(left.request, self._loop.scheduler) if left.status == "rejected" else None
        return Departure(left.request.request_id, left.status, left.time_s, left.detail, scheduled_s, told_s)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed: nobody listens any more
            self._events.call_soon_threadsafe(call, *arguments)


class Counts:
    """Observes a loop and counts what the prefix cache was asked for and held, in tokens."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.earlier_preemptions = 0  # of loops that failed

    def submitted(self, request_id: int) -> None:
        """Part of an observer."""

    def aborted(self, request_id: int) -> None:
        """Part of an observer."""

    def planned(self, plan: BatchPlan) -> None:
        """Count what was admitted."""
        if plan.admitted:
            chunk_of = dict(zip(plan.prefills, plan.chunks))
            for seq in plan.admitted:
                self.prompt_tokens += seq.known_tokens - (seq.state == DECODING)
                self.cached_tokens += chunk_of[seq][1]

    def stepped(self, step: Step) -> None:
        """Part of an observer."""

    def left(self, left: Left) -> None:
        """Part of an observer."""


def _forget(runner: StepRunner, before: int) -> None:
    runner.collect(runner.launch(StepInput((), tuple(range(before)))))
