"""The simulator as a backend of the HTTP server: simulated time goes by with real time, ``speed`` times as fast.

SimPy's own real-time environment sleeps until its next event, and would not hear of a request meanwhile. Here the server's event
loop holds one timer, for the next simulated event; a request or an abort is an event at the instant it comes. Replicas take one step
at a time, and a step's tokens are handed over together. A timer may be a millisecond late; its event keeps its own time, so that
delays do not add up and metrics tell simulated seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence

from serving.errors import InputError
from serving.http.backend import Departure, Generation, ReplicaState
from serving.http.content_keys import content_keys
from serving.http.delivery import Streams, TokenStream
from serving.http.telemetry import Telemetry
from serving.plan import BatchPlan
from serving.request import Request
from serving.rng import stream as random_stream
from serving.scenario import Scenario
from serving.scenario.workload import RequestClass
from serving.sequence import Sequence as RunningSequence
from serving.workload.classes import DEFAULT
from serving.workload.lengths import one_by_one, tokens
from sim.environment import ARRIVAL
from sim.fleet import Parts, build_fleet, new_metrics, resolve

SLICE_S = 0.005  # the event loop's other work waits no longer than this for a simulation that is behind
PIECE = 4  # characters of a word that count as a token


class SimBackend:
    """Serves requests with the fleet of a scenario (``serving.http.backend.Backend``). Answers say `` token`` again and again."""

    def __init__(self, scenario: Scenario, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InputError for a scenario whose fleet cannot be simulated, or not live."""
        for where, wish in (("cluster.pools", scenario.cluster.pools), ("cluster.autoscaling", scenario.cluster.autoscaling), ("faults", scenario.faults), ("rollout", scenario.rollout), ("sites", scenario.sites), ("stages", scenario.stages)):
            if wish:
                raise InputError(where, "cannot be served live: the fleet must be of one kind and stay as it is", "use `twinserve run`")
        self._scenario = scenario
        self._parts: Parts = resolve(scenario)
        self._speed = speed
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.llm = self._parts.llm.name
        self.max_model_len = self._parts.max_model_len
        self.tokenizer = PieceTokenizer(self._parts.llm.vocab)
        self.streams = Streams(Telemetry(self.llm))
        self._lengths = AnswerLengths(scenario)
        self._begin()

    def _begin(self) -> None:
        """Time zero of a new, empty fleet."""
        tap = TokenTap(lambda end_s, produced: self.streams.deliver(end_s, produced))
        self.cluster = build_fleet(self._scenario, {"replicas": self._parts}, new_metrics(self._scenario), stepwise=True, recording=tap)
        self.cluster.on_outcome(self._refused)
        for replica in self.cluster.replicas:
            replica.on_record = self._left
        self._homes: dict[int, int] = {}
        self._origin = self._clock()

    # -- the interface of a backend ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Let time go by from now on."""
        self._loop = asyncio.get_running_loop()
        self._origin = self._clock() - self.cluster.env.now / self._speed

    def submit(self, generation: Generation) -> TokenStream:
        """Queue a request that arrives now."""
        arrival_s = self.now_s()
        opened = self.streams.open(arrival_s, len(generation.prompt))
        row = self._lengths.class_of(generation.priority)
        cache = self._scenario.kv_cache
        request = Request(
            opened.request_id, arrival_s, len(generation.prompt), generation.max_tokens, priority=generation.priority, class_name=row.name,
            tenant=generation.tenant, prefix_hashes=content_keys(generation.prompt, cache.block_tokens) if cache.prefix_caching else (),
            ttft_slo_s=self._scenario.slo.targets(row.name).ttft_s,
        )  # fmt: skip
        output_tokens = generation.max_tokens if generation.ignore_eos else min(generation.max_tokens, self._lengths.draw(row.name, generation.max_tokens))

        def arrive(_: object) -> None:
            index = self.cluster.submit(request, output_tokens)
            if opened.end is None:
                self._homes[opened.request_id] = index

        self.cluster.env.at(arrival_s, arrive, ARRIVAL)
        self._live_on()
        return opened

    def abort(self, request_id: int) -> None:
        """Drop a request now."""

        def drop(_: object) -> None:
            if request_id in self._homes:
                self.cluster.abort(request_id, self._homes[request_id])

        self.cluster.env.at(self.now_s(), drop, ARRIVAL)
        self._live_on()

    def stats(self) -> list[ReplicaState]:
        """The replicas now."""
        states = []
        for replica in self.cluster.replicas:
            scheduler = replica.scheduler
            usage = 1 - scheduler.pool.free / scheduler.pool.total
            states.append(
                ReplicaState(
                    scheduler.running.count, scheduler.waiting_count, usage, replica.preemptions, replica.prompt_tokens, replica.cached_tokens
                )
            )
        return states

    def problem(self) -> str | None:
        """Nothing stops it for good: a fleet that fails is replaced."""
        return None

    async def close(self) -> None:
        """Let time stand still."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    # -- time -------------------------------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Simulated seconds since time zero."""
        return max(self.cluster.env.now, (self._clock() - self._origin) * self._speed)

    def advance(self, within_s: float = float("inf")) -> None:
        """Live through what is due by now, for at most ``within_s`` seconds of work.

        When a policy or a latency model raises, the requests that are here fail and a new fleet takes over.
        """
        env, until_s = self.cluster.env, self.now_s()
        stop = time.perf_counter() + within_s
        try:
            while env.peek() <= until_s:
                env.step()
                if time.perf_counter() > stop:
                    return
        except Exception as error:  # whatever a user's policy raises
            traceback.print_exception(error, file=sys.stderr)
            self.streams.fail(None, self.now_s(), f"{type(error).__name__}: {error}")
            self._begin()

    def _live_on(self) -> None:
        if self._loop is None:
            return
        self.advance(SLICE_S)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.cluster.env.peek()
        self._timer = None if due_s == float("inf") else self._loop.call_later(max(0.0, due_s - self.now_s()) / self._speed, self._live_on)

    # -- what the fleet tells -----------------------------------------------------------------------------------------------

    def _left(self, seq: RunningSequence, now_s: float, status: str) -> None:
        self._homes.pop(seq.request_id, None)
        self.streams.depart(Departure(seq.request_id, status, now_s, "", seq.scheduled_s))

    def _refused(self, request_id: int, time_s: float, status: str) -> None:
        kind, _, limit = status.partition(": ")
        if kind == "rejected":
            self.streams.depart(Departure(request_id, kind, time_s, limit))


class TokenTap:
    """Stands where a recording would (``serving.recording.Recording``) and tells after each step which requests got a token from it."""

    every_step = True

    def __init__(self, on_step: Callable[[float, dict[int, Sequence[int]]], None]) -> None:
        self._on_step = on_step
        self._decoding: dict[tuple[int, int], list[RunningSequence]] = {}

    def submitted(self, replica: int, request_id: int) -> None:
        """Part of a recording's interface."""

    def aborted(self, replica: int, request_id: int) -> None:
        """Part of a recording's interface."""

    def planned(self, replica: int, plan: BatchPlan) -> None:
        """Note who decodes, which can be asked only now."""
        if plan.decodes:
            self._decoding[replica, plan.step] = plan.decoding()

    def step(self, replica: int, plan: BatchPlan, start_s: float, end_s: float, used: int, finished: list) -> None:
        """A step was committed: each of its sequences got one token, whose value nobody knows."""
        produced = {seq.request_id: (0,) for seq in self._decoding.pop((replica, plan.step), ())}
        for seq in plan.completing:
            produced[seq.request_id] = (0,)
        self._on_step(end_s, produced)


class AnswerLengths:
    """True lengths of answers, drawn from the scenario's distribution for the class with the request's priority."""

    def __init__(self, scenario: Scenario) -> None:
        workload = scenario.workload
        self._classes = workload.classes or (DEFAULT,)
        specs = {row.name: row.output_tokens or workload.output_tokens for row in self._classes}
        self._draws = {
            name: one_by_one(tokens(spec, random_stream(scenario.seed, f"serve.output_tokens.{name}"))) for name, spec in specs.items() if spec
        }

    def class_of(self, priority: int) -> RequestClass:
        """The first class with this priority, else the first of all."""
        return next((row for row in self._classes if row.priority == priority), self._classes[0])

    def draw(self, name: str, otherwise: int) -> int:
        """The next length of class ``name``; ``otherwise`` where the scenario has no distribution of its own (traces, joint tables)."""
        draw = self._draws.get(name)
        return next(draw) if draw is not None else otherwise


class PieceTokenizer:
    """Counts tokens without a vocabulary: every four characters of a word are one, named by their checksum so that equal text is equal."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``."""
        return [zlib.crc32(word[at : at + PIECE].encode()) % self.vocab for word in text.split() for at in range(0, len(word), PIECE)]

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of all messages, one more for each role and one for the answer's beginning."""
        named = [piece for role, text in messages for piece in (zlib.crc32(role.encode()) % self.vocab, *self.encode(text))]
        return [*named, zlib.crc32(b"assistant") % self.vocab]

    def decoder(self) -> PieceTokenizer:
        """Answers have no content: it is its own decoder."""
        return self

    def push(self, token: int) -> str:
        """A word."""
        return " token"

    def flush(self) -> str:
        """Nothing is ever left."""
        return ""
