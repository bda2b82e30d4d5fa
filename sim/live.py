"""The simulator as a backend of the HTTP server: simulated time goes by with real time, ``speed`` times as fast.

SimPy's own real-time environment sleeps until its next event, and would not hear of a request meanwhile. Here the server's event
loop holds one timer, for the next simulated event; a request or an abort is an event at the instant it comes. Replicas take one step
at a time, and a step's tokens are handed over together. A timer may be a millisecond late; its event keeps its own time, so that
delays do not add up and metrics tell simulated seconds.

The fleet is the scenario's: pools, autoscaling, faults and releases go on as they would, from the moment the server starts.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.adapters import served_names
from serving.errors import InputError
from serving.http.backend import Departure, Generation, ReplicaState
from serving.http.content_keys import content_keys
from serving.http.delivery import Streams, TokenStream
from serving.http.telemetry import Telemetry
from serving.refusal import retry_after_s
from serving.request import Request
from serving.scenario import Scenario
from serving.sequence import Sequence as RunningSequence
from sim.answers import AnswerLengths, PieceTokenizer
from sim.attach import attach
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.dynamics import OFF, READY
from sim.environment import ARRIVAL
from sim.fleet import build_fleet, new_metrics, resolve_fleet
from sim.replica import Replica
from sim.rollout import Release, Split, reach
from sim.token_tap import TokenTap

SLICE_S = 0.005  # the event loop's other work waits no longer than this for a simulation that is behind
LOST = "the replica that served it was lost"
_NOT_LIVE = {
    "sites": "clients of this server come from nowhere in particular, so no site is near them",
    "stages": "clients of this server hand over whole prompts, so nothing is left for a stage before the model",
}


@dataclass(slots=True)
class Here:
    """A request that has not left: its reader, the replica that has it (-1: none yet), and what an admission policy said to it."""

    stream: TokenStream
    replica: int = -1
    repeats: int = 0  # tokens that a replica, which began again after another was lost, will make once more
    unwanted: bool = False  # to be dropped as soon as it can be: its pages are being copied just now
    retry_after_s: float | None = None


class SimBackend:
    """Serves requests with the fleet of a scenario (``serving.http.backend.Backend``). Answers say `` token`` again and again."""

    def __init__(self, scenario: Scenario, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InputError for a scenario whose fleet cannot be simulated, or not live."""
        for where, reason in _NOT_LIVE.items():
            if getattr(scenario, where):
                raise InputError(where, f"cannot be served live: {reason}", f"leave '{where}' out, or use `twinserve run`")
        if scenario.front:
            raise InputError("integrity", "cannot be served live: this server checks no request", "keep only step_s and token_s, or use `twinserve run`")
        self._scenario = scenario
        self._parts = resolve_fleet(scenario)
        self._speed = speed
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        parts = list(self._parts.values())
        self.llm = parts[0].llm.name
        self.adapters = served_names(scenario)
        self.max_model_len = min(part.max_model_len for part in parts)
        self.tokenizer = PieceTokenizer(parts[0].llm.vocab)
        self.streams = Streams(Telemetry(self.llm))
        self._lengths = AnswerLengths(scenario)
        self._begin()

    def _begin(self) -> None:
        """Time zero of a new, empty fleet."""
        scenario, metrics = self._scenario, new_metrics(self._scenario)
        self._first_lands = scenario.cluster.first_token == "decode"
        tap = TokenTap(self._stepped, self._submitted, keeps_first=self._first_lands)
        self.cluster = build_fleet(scenario, self._parts, metrics, stepwise=True, recording=tap)
        self.cluster.on_outcome(self._outcome)
        self._dynamics = attach(self.cluster, scenario, self._parts, metrics)
        if self._dynamics is not None:
            self._dynamics.fleet.forever = True
        if scenario.rollout is not None:
            self._release = Release([self.cluster], scenario.rollout, scenario.slo, scenario.seed, reach(scenario))
        if isinstance(self.cluster, Disaggregated):
            self.cluster.on_landed = self._landed
        self._replicas = self.cluster.replicas
        self._pools = _pools(self.cluster)
        for replica in self._replicas:
            replica.take_back = self._told
            replica.on_record = _both(self._left, replica.on_record)
        self._here: dict[int, Here] = {}
        self._repeating: set[int] = set()  # those here of which some replica makes tokens once more
        self._origin = self._clock()

    @property
    def fleet(self) -> str:
        """The replicas in words."""
        gpu, count = self._scenario.cluster.gpu, len(self._replicas)
        if isinstance(self.cluster, Disaggregated):
            pools = [(role, part.scenario.cluster) for role, part in self._parts.items()]
            return ", ".join(f"{role}: {pool.replicas} x {pool.gpu}" for role, pool in pools)
        if isinstance(self.cluster, Split):
            return f"{self.cluster.provisioned} x {gpu} and a release"
        return f"up to {count} x {gpu}" if self._scenario.cluster.autoscaling is not None else f"{count} x {gpu}"

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
            tenant=generation.tenant, ttft_slo_s=self._scenario.slo.targets(row.name).ttft_s, adapter=generation.adapter,
            prefix_hashes=content_keys(generation.prompt, cache.block_tokens, generation.adapter) if cache.prefix_caching else (),
        )  # fmt: skip
        output_tokens = generation.max_tokens
        if not generation.ignore_eos:
            output_tokens = min(output_tokens, self._lengths.draw(row.name, output_tokens))
        here = self._here[opened.request_id] = Here(opened)

        def arrive(_: object) -> None:
            index = self.cluster.submit(request, output_tokens)
            if here.replica < 0 and isinstance(self.cluster, Cluster):
                here.replica = index  # on its way there over the links

        self.cluster.env.at(arrival_s, arrive, ARRIVAL)
        self._live_on()
        return opened

    def abort(self, request_id: int) -> None:
        """Drop a request now, or as soon as it can be."""
        self._drop(request_id)
        self._live_on()

    def _drop(self, request_id: int) -> None:
        def drop(_: object) -> None:
            here = self._here.get(request_id)
            if here is not None and not self.cluster.abort(request_id, here.replica):
                here.unwanted = True

        self.cluster.env.at(self.now_s(), drop, ARRIVAL)

    def stats(self) -> list[ReplicaState]:
        """The replicas now."""
        states = []
        for position, replica in enumerate(self._replicas):
            scheduler = replica.scheduler
            usage = 1 - scheduler.pool.free / scheduler.pool.total
            states.append(
                ReplicaState(
                    scheduler.running.count, scheduler.waiting_count, usage, replica.preemptions, replica.prompt_tokens, replica.cached_tokens,
                    self._state(position), self._pools[position],
                )
            )  # fmt: skip
        return states

    def _state(self, position: int) -> str:
        if self._dynamics is not None:
            return self._dynamics.fleet.states[position]
        if isinstance(self.cluster, Split):
            return READY if self.cluster.takes(position) else OFF
        return READY

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

    def _submitted(self, replica: int, request_id: int) -> None:
        """A request has come to a replica; if to another before, that one is lost, and this one begins again."""
        here = self._here[request_id]
        here.replica, here.repeats = replica, here.stream.count
        if here.unwanted:
            self._drop(request_id)
        elif here.repeats:
            self._repeating.add(request_id)

    def _landed(self, request_id: int, replica: Replica, now_s: float) -> None:
        """The pages of a request have reached its decode replica."""
        here = self._here[request_id]
        here.replica = replica.label
        if here.unwanted:
            self._drop(request_id)
        if self._first_lands:
            self._stepped(now_s, {request_id: (0,)})

    def _stepped(self, end_s: float, produced: dict[int, Sequence[int]]) -> None:
        if self._repeating:
            produced = {each: new for each, tokens in produced.items() if (new := self._news(each, tokens))}
        self.streams.deliver(end_s, produced)

    def _news(self, request_id: int, tokens: Sequence[int]) -> Sequence[int]:
        """Those of the tokens that its reader does not have yet."""
        if request_id not in self._repeating:
            return tokens
        here = self._here[request_id]
        known = min(here.repeats, len(tokens))
        here.repeats -= known
        if not here.repeats:
            self._repeating.discard(request_id)
        return tokens[known:]

    def _told(self, replica: Replica, request: Request, output_tokens: int, limit: str) -> bool:
        """A refusal: keep what the client is to be told. It is no simulated client, so nobody takes the request back."""
        self._here[request.request_id].retry_after_s = retry_after_s(request, replica.scheduler)
        return False

    def _left(self, seq: RunningSequence, now_s: float, status: str) -> None:
        self._depart(Departure(seq.request_id, status, now_s, "", seq.scheduled_s))

    def _outcome(self, request_id: int, time_s: float, status: str) -> None:
        """Who never had a sequence, or lost it, leaves here; the others have left already."""
        here = self._here.get(request_id)
        if here is None:
            return
        kind, _, detail = status.partition(": ")
        told_s = None if here.retry_after_s is None else here.retry_after_s / self._speed
        self._depart(Departure(request_id, kind, time_s, LOST if kind == "error" else detail, retry_after_s=told_s))

    def _depart(self, departure: Departure) -> None:
        self._here.pop(departure.request_id, None)
        self._repeating.discard(departure.request_id)
        self.streams.depart(departure)


def _both(first: Callable[..., None], second: Callable[..., None] | None) -> Callable[..., None]:
    """One call for two listeners."""
    if second is None:
        return first

    def call(*told: object) -> None:
        first(*told)
        second(*told)

    return call


def _pools(cluster: Cluster | Disaggregated | Split) -> list[str]:
    """What each replica is there for, where they differ."""
    if isinstance(cluster, Disaggregated):
        return ["prefill"] * len(cluster.prefill.replicas) + ["decode"] * len(cluster.decode.replicas)
    if isinstance(cluster, Split):
        return ["baseline"] * len(cluster.baseline.replicas) + ["candidate"] * len(cluster.candidate.replicas)
    return [""] * len(cluster.replicas)
