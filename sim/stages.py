"""Stages before the model: stations that every request passes in order, each once, before a replica sees it.

First come, first served, so that the time at which a request is done is known when it comes: a station keeps the time at which each
server will be free, and one event a request and stage is all there is. A stage that remembers (``sim.recall``) is looked at before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapreplace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.errors import InputError
from serving.histogram import Histogram
from serving.metrics import COMPLETED, Metrics
from serving.records import TableLog
from serving.request import Request
from serving.rng import stream
from serving.scenario import Scenario
from serving.scenario.stages import FrontStage
from serving.workload.lengths import largest_tokens, one_by_one, seconds, tokens
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.environment import ARRIVAL
from sim.recall import Keyed, Memory, Recall, asked
from sim.replica import Replica
from sim.rollout import Split
from sim.sites import SiteFleet

if TYPE_CHECKING:
    from sim.fleet import Parts

_FLUSH = 4096
ANSWERED = ("stop", "length")


def longest_request(scenario: Scenario, parts: dict[str, Parts]) -> int:
    """Tokens that prompt and answer may have as they arrive, so that some replica can hold them with all that stages may add.

    Raises InputError when that could be any number of tokens, or leaves nothing.
    """
    longest = (min if scenario.sites is None else max)(part.max_model_len for part in parts.values())
    for index, stage in enumerate(scenario.stages):
        if stage.adds_tokens is None:
            continue
        most = largest_tokens(stage.adds_tokens)
        if most is None:
            raise InputError(f"stages[{index}].adds_tokens", "may add any number of tokens", "give it a max")
        longest -= most
        if longest < 2:
            raise InputError(
                f"stages[{index}].adds_tokens", f"up to {most} more tokens leave no room for a prompt", "lower max, or raise max_model_len"
            )
    return longest


class Passage:
    """One request on its way through the stages of the place where it entered."""

    __slots__ = ("asks", "behind", "entered_s", "index", "outcome", "output_tokens", "request", "started_s", "stations", "status")

    def __init__(self, request: Request, output_tokens: int, asks: int, stations: list[Station], behind: list[Station]) -> None:
        self.request, self.output_tokens, self.asks, self.stations, self.behind = request, output_tokens, asks, stations, behind
        self.index = 0
        self.status = ""  # how the model's answer ended, once it has
        self.entered_s = self.started_s = math.nan
        self.outcome = ""

    @property
    def key(self) -> int:
        """What the stage goes by where the request is."""
        return self.request.image if self.stations[self.index].spec.encodes_images else self.asks


class Station:
    """One stage at one place."""

    def __init__(self, spec: FrontStage, place: str, seed: int, memory: Memory | None = None) -> None:
        name = f"stages.{spec.name}.{place}"
        self.spec, self.place, self.memory = spec, place, memory
        self.requests = 0  # that a server served
        self.busy_s = 0.0
        self._free_s = [0.0] * spec.servers  # when each server will have done what it has, a heap
        self._service_s = one_by_one(seconds(spec.service_s, stream(seed, f"{name}.service")))
        self._comes = repeat(0.0) if spec.share == 1 else one_by_one(stream(seed, f"{name}.share").random)
        self._tokens = spec.adds_tokens and one_by_one(tokens(spec.adds_tokens, stream(seed, f"{name}.tokens"), least=0))
        self._noted: tuple[list[float], ...] = ([], [], [])
        self.wait, self.service, self.whole = Histogram(), Histogram(), Histogram()

    def takes(self, request: Request) -> bool:
        """Whether the request is served here; decided once for each."""
        if self.spec.encodes_images and request.image is None:
            return False
        return (not self.spec.classes or request.class_name in self.spec.classes) and next(self._comes) < self.spec.share

    def enter(self, now_s: float, prompt_tokens: int = 0) -> tuple[float, float]:
        """A request comes to the servers; returns when it is begun and when it is done."""
        service_s = next(self._service_s) + self.spec.prompt_token_s * prompt_tokens
        start_s = max(now_s, self._free_s[0])
        end_s = start_s + service_s
        heapreplace(self._free_s, end_s)
        self.requests += 1
        self.busy_s += service_s
        self._noted[0].append(start_s - now_s)
        self._noted[1].append(service_s)
        return start_s, end_s

    def left(self, whole_s: float) -> None:
        """A request leaves, ``whole_s`` after it came."""
        self._noted[2].append(whole_s)
        if len(self._noted[2]) >= _FLUSH:
            self.flush()

    def changed(self, request: Request) -> Request:
        """What comes out: the request with the tokens that were added behind its prompt."""
        added = next(self._tokens) if self._tokens is not None else 0
        if not added:
            return request
        # What is generated now stands behind other content than the next turn will quote: nobody can ask for it again.
        return request._replace(prompt_tokens=request.prompt_tokens + added, generated_hash_seed=None)

    def flush(self) -> None:
        """Put the times that were noted into the histograms."""
        for times, histogram in zip(self._noted, (self.wait, self.service, self.whole)):
            histogram.add(np.array(times))
            times.clear()


class Front:
    """The stages before a fleet, with the interface of one ``Cluster``."""

    def __init__(
        self, fleet: Cluster | Disaggregated | Split | SiteFleet, scenario: Scenario, metrics: Metrics, log: TableLog | None
    ) -> None:
        """Raises InputError for a mistake in a policy."""
        self.env, self.fleet = fleet.env, fleet
        self.arrived = 0
        self.arrivals_end_s = 0.0
        self._inside = 0
        self._end_s = 0.0
        self._log, self._metrics = log, metrics
        self._entrance: Callable[[Request], int] = fleet.entrances.of if isinstance(fleet, SiteFleet) else lambda request: 0
        places = fleet.places if isinstance(fleet, SiteFleet) else {0: ""}
        built = {place: _stations(scenario, name) for place, name in places.items()}
        self._stations = {place: [station for station in column if not station.spec.after_answer] for place, column in built.items()}
        self._behind = {place: [station for station in column if station.spec.after_answer] for place, column in built.items()}
        queries = scenario.workload.queries
        self._asked = repeat(0) if queries is None else asked(queries, scenario.seed)
        self._watchers: list[Callable[[int, float, str], None]] = []
        self._unanswered: dict[int, Passage] = {}  # whose answers will be remembered, or pass further stages
        self._done, self._done_s = Histogram(), []  # from arrival to the last stage behind the answer, and what is not in there yet
        self._follows = any(self._behind.values()) or any(_answers(column) is not None for column in self._stations.values())
        if self._follows:
            fleet.on_outcome(self._answered)

    # -- the interface of a cluster -------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """The fleet's."""
        return self.fleet.replicas

    @property
    def provisioned(self) -> int:
        """Replicas that are paid for."""
        return getattr(self.fleet, "provisioned", len(self.fleet.replicas))

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        return self._inside + self.fleet.in_flight

    @property
    def end_s(self) -> float:
        """Time of the last arrival, stage or step."""
        return max(self.arrivals_end_s, self._end_s, self.fleet.end_s)

    def submit(self, request: Request, output_tokens: int) -> None:
        """A request arrives at the first stage."""
        self.arrived += 1
        self.arrivals_end_s = self.env.now
        self._inside += 1
        place = self._entrance(request)
        self._go_on(Passage(request, output_tokens, next(self._asked), self._stations[place], self._behind[place]))

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves, at that time."""
        self._watchers.append(watcher)
        if not self._follows:
            self.fleet.on_outcome(watcher)

    def drain(self) -> None:
        """Let every replica finish what it holds."""
        self.fleet.drain()

    # -- stages ---------------------------------------------------------------------------------------------------------

    def _go_on(self, passage: Passage) -> None:
        """To the next stage that takes the request, or to the fleet."""
        stations = passage.stations
        while passage.index < len(stations):
            station = stations[passage.index]
            if station.takes(passage.request):
                passage.entered_s = self.env.now
                passage.outcome = ""
                if station.memory is None:
                    self._serve(passage)
                else:
                    self._look(passage, station.memory)
                return
            passage.index += 1
        self._inside -= 1
        if passage.status:
            self._finished(passage)
            self._tell(passage.request.request_id, self.env.now, passage.status)
            return
        if self._follows:
            self._unanswered[passage.request.request_id] = passage
        self.fleet.submit(passage.request, passage.output_tokens)

    def _look(self, passage: Passage, memory: Memory) -> None:
        now_s = self.env.now
        found = memory.look(passage.key, now_s)
        passage.outcome = found.outcome
        passage.started_s = now_s
        if found.answer_tokens is not None:
            self._after(found.seconds, lambda event: self._answer(passage, found.answer_tokens))
        elif found.served:
            self._after(found.seconds, lambda event: self._served(passage))
        else:
            self._after(found.seconds, lambda event: self._serve(passage))

    def _after(self, delay_s: float, action: Callable[[object], None]) -> None:
        if delay_s:
            self.env.at(self.env.now + delay_s, action, ARRIVAL)
        else:
            action(None)

    def _serve(self, passage: Passage) -> None:
        passage.started_s, end_s = passage.stations[passage.index].enter(self.env.now, passage.request.prompt_tokens)
        self.env.at(end_s, lambda event: self._served(passage), ARRIVAL)

    def _served(self, passage: Passage) -> None:
        memory = passage.stations[passage.index].memory
        if memory is None:
            self._leave(passage)
        else:
            self._after(memory.served(passage.key, self.env.now), lambda event: self._leave(passage))

    def _leave(self, passage: Passage) -> None:
        station = passage.stations[passage.index]
        if station.memory is not None:
            station.memory.keep(passage.key, passage.outcome, self.env.now)
        self._note(passage, station)
        passage.request = station.changed(passage.request)
        passage.index += 1
        self._go_on(passage)

    def _note(self, passage: Passage, station: Station) -> None:
        self._end_s = now_s = self.env.now
        station.left(now_s - passage.entered_s)
        if self._log is not None:
            self._log.append(
                (passage.request.request_id, station.spec.name, station.place, passage.entered_s, passage.started_s, now_s, passage.outcome)
            )
            self._log.flush_if_full()

    # -- answers given before -------------------------------------------------------------------------------------------

    def _answer(self, passage: Passage, output_tokens: int) -> None:
        """The request has its answer, all at once, and leaves."""
        self._note(passage, passage.stations[passage.index])
        self._inside -= 1
        request, now_s, metrics = passage.request, self.env.now, self._metrics
        index = metrics.class_index(request.class_name)
        metrics.finish(
            (request.request_id, index, request.arrival_s, request.prompt_tokens, 0, output_tokens, now_s, now_s, now_s, 0, -1, COMPLETED)
        )
        metrics.flush_if_full()
        if passage.behind:  # which it has passed when it was given first
            self._finished(passage)
        self._tell(request.request_id, now_s, "stop")

    def _finished(self, passage: Passage) -> None:
        self._done_s.append(self.env.now - passage.request.arrival_s)
        if len(self._done_s) >= _FLUSH:
            self._done.add(np.array(self._done_s))
            self._done_s.clear()

    def _answered(self, request_id: int, time_s: float, status: str) -> None:
        """The fleet is done with a request: remember its answer, and let it pass the stages behind the model."""
        passage = self._unanswered.pop(request_id)
        if status in ANSWERED:
            answers = _answers(passage.stations)
            if answers is not None:
                answers.answered(passage.asks, min(passage.output_tokens, passage.request.max_output_tokens), time_s)
            if passage.behind:
                passage.stations, passage.index, passage.status = passage.behind, 0, status
                self._inside += 1
                self._go_on(passage)
                return
        self._tell(request_id, time_s, status)

    def _tell(self, request_id: int, time_s: float, status: str) -> None:
        for watcher in self._watchers:
            watcher(request_id, time_s, status)

    # -- accounts -------------------------------------------------------------------------------------------------------

    def report(self) -> list[dict[str, Any]]:
        """The ``stages`` part of summary.json: each stage over all places where it stands; what it remembers, place by place."""
        columns = (*zip(*self._stations.values()), *zip(*self._behind.values()))
        return [_report(column, self.end_s) for column in columns]

    def done_s(self) -> dict[str, float | None] | None:
        """From arrival until the last stage behind the answer, over all who had one; None where there is no such stage."""
        if not any(self._behind.values()):
            return None
        self._done.add(np.array(self._done_s))
        self._done_s.clear()
        return self._done.summary()


def _stations(scenario: Scenario, place: str) -> list[Station]:
    built = []
    for index, spec in enumerate(scenario.front):
        memory: Memory | None = None
        name = f"stages.{spec.name}.{place}"
        if spec.cache is not None:
            memory = Keyed(spec.cache, scenario.seed, name, f"stages[{index}].cache.branch")
        elif spec.retrieval is not None:
            memory = Recall(spec.retrieval, scenario.workload.queries, scenario.seed, name)
        built.append(Station(spec, place, scenario.seed, memory))
    return built


def _answers(stations: list[Station]) -> Recall | None:
    """What remembers answers, among the stages of one place: the first that does."""
    return next((each.memory for each in stations if isinstance(each.memory, Recall) and each.memory.answers is not None), None)


def _report(column: tuple[Station, ...], end_s: float) -> dict[str, Any]:
    spec, servers = column[0].spec, column[0].spec.servers * len(column)
    whole = (Histogram(), Histogram(), Histogram())
    for station in column:
        station.flush()
        for histogram, own in zip(whole, (station.wait, station.service, station.whole)):
            histogram.merge(own)
    wait, service, time = (histogram.summary() for histogram in whole)
    row = {
        "name": spec.name,
        "servers": servers,
        "requests": whole[2].count,
        "served": whole[1].count,
        "time_s": time,
        "wait_s": wait,
        "service_s": service,
    }
    row["busy_fraction"] = sum(station.busy_s for station in column) / (servers * end_s) if end_s else None
    memories = [station.memory.report() for station in column if station.memory is not None]
    return {**row, **memories[0]} if len(memories) == 1 else {**row, **({"places": memories} if memories else {})}
