"""A fleet at several sites: clusters of their own, joined inwards by links, with the interface of one ``Cluster`` (system A13).

A request enters at a site; a policy says which of those on its way to the centre serves it; its prompt crosses the links in between
as a flow that shares them (``sim.network``).
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from serving.errors import IllegalAnswerError, InputError, nearest
from serving.histogram import Histogram
from serving.policies.protocols import Site
from serving.records import TableLog
from serving.request import Request
from serving.scenario.sites import Sites
from serving.scenario.stages import NETWORK
from serving.topology import join_sites
from sim.cluster import Cluster
from sim.environment import Environment
from sim.network import Network
from sim.replica import Replica
from sim.rollout import Split
from sim.topology import LinkGraph


class Entrances:
    """Where each request enters: by a checksum of its session, or of itself, so that it depends on nothing else that is drawn."""

    def __init__(self, sites: Sites, seed: int) -> None:
        self.places = [index for index, site in enumerate(sites.places) if site.users]
        self._bounds = list(accumulate(sites.places[index].users for index in self.places))
        self._seed = seed

    def of(self, request: Request) -> int:
        """Position of the site in the scenario's list."""
        who = request.request_id if request.session is None else f"session {request.session}"
        level = zlib.crc32(f"{self._seed} enters {who}".encode()) / 2**32 * self._bounds[-1]
        return self.places[min(bisect_right(self._bounds, level), len(self.places) - 1)]


class Candidates:
    """The way of one request, as its policy sees it (``serving.policies.protocols.Way``)."""

    __slots__ = ("_ask", "levels", "places", "replicas", "round_trip_s")

    def __init__(
        self, places: list[int], levels: list[str], replicas: list[int], round_trip_s: list[float], ask: Callable[[int], int]
    ) -> None:
        self.places, self.levels, self.replicas, self.round_trip_s, self._ask = places, levels, replicas, round_trip_s, ask

    def waiting(self, position: int) -> int:
        """Requests that are on their way to a site or have not been started there."""
        return self._ask(self.places[position])


class Served(NamedTuple):
    """One site with replicas."""

    clusters: tuple[Cluster, ...]  # the baseline and the candidate where a release is under way
    takes: Cluster | Split
    longest_tokens: int
    facts: Mapping[str, Any]


class SiteFleet:
    """The sites' clusters behind one entrance."""

    def __init__(
        self, spec: Sites, served: dict[int, Served], env: Environment, policy: Site, entrances: Entrances, log: TableLog | None
    ) -> None:
        """``served`` are the sites with replicas by position in ``spec.places``. Raises InputError for a policy that names an unknown tier."""
        for level in getattr(policy, "levels_named", ()):
            if level not in spec.levels:
                raise InputError(spec.routing.where, f"there is no tier '{level}'", nearest(level, spec.levels))
        self.env = env
        self.entrances = entrances
        self.served = served
        self.arrived = 0
        self.arrivals_end_s = 0.0
        self._spec, self._policy, self._log = spec, policy, log
        self._network = (
            Network(LinkGraph(join_sites(_links(spec), len(spec.places))), env) if any(site.uplink for site in spec.places) else None
        )
        self._coming = [0] * len(spec.places)
        self._ways = {place: self._way(place) for place in entrances.places}
        self._counts = {place: [0, 0] for place in served}  # requests served, of which came from further out
        self._trips = Histogram()

    def _way(self, entrance: int) -> list[tuple[int, float]]:
        """Sites with replicas from ``entrance`` inwards, each with the round trip to it."""
        numbers = {site.name: index for index, site in enumerate(self._spec.places)}
        way, trip_s = [], 0.0
        for site in self._spec.inwards(self._spec.places[entrance].name):
            if numbers[site.name] in self.served:
                way.append((numbers[site.name], trip_s))
            trip_s += site.uplink.round_trip_s if site.uplink is not None else 0.0
        return way

    # -- the interface of a cluster -------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, site by site."""
        return [replica for site in self.served.values() for cluster in site.clusters for replica in cluster.replicas]

    @property
    def places(self) -> dict[int, str]:
        """Sites where users enter: position and name."""
        return {place: self._spec.places[place].name for place in self.entrances.places}

    @property
    def provisioned(self) -> int:
        """Replicas that are paid for: a release changes what they run, not how many there are."""
        return sum(len(site.clusters[0].replicas) for site in self.served.values())

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        return sum(self._coming) + sum(cluster.in_flight for site in self.served.values() for cluster in site.clusters)

    @property
    def end_s(self) -> float:
        """Time of the last arrival or step."""
        return max(self.arrivals_end_s, *(cluster.end_s for site in self.served.values() for cluster in site.clusters))

    def submit(self, request: Request, output_tokens: int) -> int:
        """Choose a site now and send the request there; returns the site's position."""
        self.arrived += 1
        self.arrivals_end_s = self.env.now
        return self.resubmit(request, output_tokens)

    def resubmit(self, request: Request, output_tokens: int) -> int:
        """The same for a request that comes again."""
        entrance = self.entrances.of(request)
        place = self._choose(request, entrance)
        self._counts[place][0] += 1
        if place == entrance:
            self.served[place].takes.submit(request, output_tokens)
            return place
        self._counts[place][1] += 1
        self._coming[place] += 1
        left_s = self.env.now
        self._network.start(
            f"site{entrance}", f"site{place}", request.prompt_tokens * self._spec.bytes_per_token,
            lambda flow: self._come(request, output_tokens, place, left_s),
        )  # fmt: skip
        return place

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves, at that time."""
        for site in self.served.values():
            site.takes.on_outcome(watcher)

    def drain(self) -> None:
        """Let every replica finish what it holds."""
        for site in self.served.values():
            for cluster in site.clusters:
                cluster.drain()

    # -- who serves -----------------------------------------------------------------------------------------------------

    def _choose(self, request: Request, entrance: int) -> int:
        needed = request.prompt_tokens + request.max_output_tokens
        way = self._ways[entrance]
        able = [step for step in way if needed <= self.served[step[0]].longest_tokens] or way[-1:]
        places = [place for place, _ in able]
        seen = Candidates(
            places, [self._spec.places[place].level for place in places], [len(self.served[place].clusters[0].replicas) for place in places],
            [trip_s for _, trip_s in able], self._waiting,
        )  # fmt: skip
        position = self._policy.serve_at(request, seen)
        if not 0 <= position < len(places):
            raise IllegalAnswerError(f"site policy {type(self._policy).__name__} chose position {position} of {len(places)}")
        return places[position]

    def _waiting(self, place: int) -> int:
        clusters = self.served[place].clusters
        for cluster in clusters:
            cluster.settle_signals()
            cluster.look(self.env.now)
        return self._coming[place] + sum(replica.scheduler.waiting_count for cluster in clusters for replica in cluster.replicas)

    def _come(self, request: Request, output_tokens: int, place: int, left_s: float) -> None:
        now_s = self.env.now
        self._coming[place] -= 1
        self._trips.add(np.array([now_s - left_s]))
        if self._log is not None:
            self._log.append((request.request_id, NETWORK, self._spec.places[place].name, left_s, left_s, now_s, ""))
            self._log.flush_if_full()
        self.served[place].takes.submit(request, output_tokens)

    def splits(self) -> list[Split]:
        """The sites where a release runs."""
        return [site.takes for site in self.served.values() if isinstance(site.takes, Split)]

    def report(self) -> dict[str, Any]:
        """The ``sites`` part of summary.json."""
        end_s, rows = self.end_s, []
        for place, site in self.served.items():
            replicas = [replica for cluster in site.clusters for replica in cluster.replicas]
            busy_s = sum(replica.busy_until(end_s) for replica in replicas)
            requests, from_outside = self._counts[place]
            paid_s = len(site.clusters[0].replicas) * end_s
            rows.append(
                {**site.facts, "requests": requests, "from_outside": from_outside, "gpu_busy_fraction": busy_s / paid_s if paid_s else None}
            )
        return {"places": rows, "network_s": self._trips.summary()}


def _links(spec: Sites) -> list[tuple[int, int, float, float]]:
    """Links as (site, next site inwards, seconds, bytes per second): the whole round trip is spent on the way in."""
    numbers = {site.name: index for index, site in enumerate(spec.places)}
    return [
        (numbers[site.name], numbers[site.inward], site.uplink.round_trip_s, site.uplink.bytes_per_s)
        for site in spec.places
        if site.uplink is not None
    ]
