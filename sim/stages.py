"""Stages before the model: stations that every request passes in order, each once, before a replica sees it.

First come, first served, so that the time at which a request leaves is known when it comes: a station keeps the time at which
each server will be free, and one event a request and stage is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapreplace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.errors import InputError
from serving.histogram import Histogram
from serving.records import TableLog
from serving.request import Request
from serving.rng import stream
from serving.scenario import Scenario
from serving.scenario.stages import FrontStage
from serving.workload.lengths import largest_tokens, one_by_one, seconds, tokens
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.environment import ARRIVAL
from sim.replica import Replica
from sim.rollout import Split
from sim.sites import SiteFleet

if TYPE_CHECKING:
    from sim.fleet import Parts

_FLUSH = 4096


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


class Station:
    """One stage at one place."""

    def __init__(self, spec: FrontStage, place: str, seed: int) -> None:
        self.spec = spec
        self.place = place
        self.requests = 0
        self.busy_s = 0.0
        self._free_s = [0.0] * spec.servers  # when each server will have done what it has, a heap
        self._service_s = one_by_one(seconds(spec.service_s, stream(seed, f"stages.{spec.name}.{place}.service")))
        self._comes = repeat(0.0) if spec.share == 1 else one_by_one(stream(seed, f"stages.{spec.name}.{place}.share").random)
        self._tokens = spec.adds_tokens and one_by_one(
            tokens(spec.adds_tokens, stream(seed, f"stages.{spec.name}.{place}.tokens"), least=0)
        )
        self._waits_s: list[float] = []
        self._times_s: list[float] = []
        self.wait, self.service = Histogram(), Histogram()

    def takes(self, request: Request) -> bool:
        """Whether the request is served here; decided once for each."""
        return (not self.spec.classes or request.class_name in self.spec.classes) and next(self._comes) < self.spec.share

    def enter(self, now_s: float) -> tuple[float, float]:
        """A request comes; returns when it is begun and when it is done."""
        service_s = next(self._service_s)
        start_s = max(now_s, self._free_s[0])
        end_s = start_s + service_s
        heapreplace(self._free_s, end_s)
        self.requests += 1
        self.busy_s += service_s
        self._waits_s.append(start_s - now_s)
        self._times_s.append(service_s)
        if len(self._waits_s) >= _FLUSH:
            self.flush()
        return start_s, end_s

    def changed(self, request: Request) -> Request:
        """What comes out: the request with the tokens that were added behind its prompt."""
        added = next(self._tokens) if self._tokens is not None else 0
        if not added:
            return request
        # What is generated now stands behind other content than the next turn will quote: nobody can ask for it again.
        return request._replace(prompt_tokens=request.prompt_tokens + added, generated_hash_seed=None)

    def flush(self) -> None:
        """Put the waits and service times that were noted into the histograms."""
        for times, histogram in ((self._waits_s, self.wait), (self._times_s, self.service)):
            histogram.add(np.array(times))
            times.clear()


class Front:
    """The stages before a fleet, with the interface of one ``Cluster``."""

    def __init__(
        self, fleet: Cluster | Disaggregated | Split | SiteFleet, stages: Sequence[FrontStage], seed: int, log: TableLog | None
    ) -> None:
        self.env = fleet.env
        self.fleet = fleet
        self.arrived = 0
        self.arrivals_end_s = 0.0
        self._inside = 0
        self._end_s = 0.0
        self._log = log
        self._entrance: Callable[[Request], int] = fleet.entrances.of if isinstance(fleet, SiteFleet) else lambda request: 0
        places = fleet.places if isinstance(fleet, SiteFleet) else {0: ""}
        self._stations = {place: [Station(spec, name, seed) for spec in stages] for place, name in places.items()}

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
        self._pass(request, output_tokens, self._stations[self._entrance(request)], 0)

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves, at that time."""
        self.fleet.on_outcome(watcher)

    def drain(self) -> None:
        """Let every replica finish what it holds."""
        self.fleet.drain()

    # -- stages ---------------------------------------------------------------------------------------------------------

    def _pass(self, request: Request, output_tokens: int, stations: list[Station], first: int) -> None:
        """Go on from stage ``first``."""
        for index in range(first, len(stations)):
            if stations[index].takes(request):
                self._serve(request, output_tokens, stations, index)
                return
        self._inside -= 1
        self.fleet.submit(request, output_tokens)

    def _serve(self, request: Request, output_tokens: int, stations: list[Station], index: int) -> None:
        station, now_s = stations[index], self.env.now
        start_s, end_s = station.enter(now_s)
        if self._log is not None:
            self._log.append((request.request_id, station.spec.name, station.place, now_s, start_s, end_s, ""))
            self._log.flush_if_full()
        self.env.at(end_s, lambda event: self._done(request, output_tokens, stations, index), ARRIVAL)

    def _done(self, request: Request, output_tokens: int, stations: list[Station], index: int) -> None:
        self._end_s = self.env.now
        self._pass(stations[index].changed(request), output_tokens, stations, index + 1)

    def report(self) -> list[dict[str, Any]]:
        """The ``stages`` part of summary.json: each stage over all places where it stands."""
        end_s, rows = self.end_s, []
        for column in zip(*self._stations.values()):
            spec, first = column[0].spec, column[0]
            for station in column:
                station.flush()
                if station is not first:
                    first.wait.merge(station.wait)
                    first.service.merge(station.service)
            servers = spec.servers * len(column)
            rows.append(
                {
                    "name": spec.name, "servers": servers, "requests": sum(station.requests for station in column), "wait_s": first.wait.summary(),
                    "service_s": first.service.summary(), "busy_fraction": sum(station.busy_s for station in column) / (servers * end_s) if end_s else None,
                }
            )  # fmt: skip
        return rows
