"""Requests cross the topology's links to the replica that serves them: from where they enter, as flows that share every link.

A router that knows the topology sees how far each replica is and how busy the links to it are (system A12).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serving.errors import InputError
from serving.histogram import Histogram
from serving.request import Request
from serving.scenario.parallel import Ingress
from sim.flows import Flow
from sim.network import Network

if TYPE_CHECKING:
    from sim.cluster import Cluster

PLANNED_SHARE = 0.8  # of the narrowest link on a route: what a router may plan with


class OnTheWay(NamedTuple):
    """A request whose tokens are crossing the links."""

    request: Request
    output_tokens: int
    replica: int
    flow: Flow


class Delivery:
    """Carries requests from their ingress to the first GPU of a replica. One per fleet; attach it before the first arrival."""

    def __init__(self, cluster: Cluster, network: Network, ingress: Ingress, gpus: list[str], rng: np.random.Generator) -> None:
        """``gpus`` names the GPU of each replica that takes its requests in. Raises InputError for an unknown ingress."""
        graph = network.graph
        points = list(ingress.at) or graph.components("host_memory")
        if not points:
            raise InputError("cluster.ingress.at", "the topology has no host memory where requests could enter", "name components")
        for point in ingress.at:
            graph.place(point, "cluster.ingress.at")
        self._cluster, self._network, self._rng = cluster, network, rng
        self._points, self._gpus = points, gpus
        self._bytes_per_token = ingress.bytes_per_token
        self._routes = [[graph.route(point, gpu) for gpu in gpus] for point in points]
        self._pending_bytes: dict[int, float] = {}  # by channel, of what is on its way
        self._under_way: dict[int, OnTheWay] = {}
        self._entering: tuple[int, int] = (-1, 0)  # the request being routed, and where it enters
        self._request_bytes = 0.0
        self._times = Histogram()
        self._rates: list[float] = [0, 0.0, 0.0]  # of transfers: how many, mean, sum of squared differences
        self._done_s: list[float] = []

    @property
    def network(self) -> Network:
        """The links that requests cross."""
        return self._network

    def __len__(self) -> int:
        """Requests on their way."""
        return len(self._under_way)

    # -- what a router sees -------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """``request`` is about to be routed: draw where it enters."""
        if self._entering[0] != request.request_id:
            self._entering = (request.request_id, int(self._rng.integers(len(self._points))))
        self._request_bytes = request.prompt_tokens * self._bytes_per_token

    def distance_s(self, replica: int) -> float:
        """Seconds before the first byte of the entering request could reach ``replica``."""
        return self._routes[self._entering[1]][replica].latency_s

    def delivery_s(self, replica: int) -> float:
        """Seconds to deliver it, with 0.8 of the narrowest link's rate shared with what is under way there."""
        route = self._routes[self._entering[1]][replica]
        pending = self._pending_bytes
        busiest = max(
            (times * (pending.get(channel.index, 0.0) + self._request_bytes) / channel.bytes_per_s for channel, times in route.channels), default=0.0
        )
        return route.latency_s + busiest / PLANNED_SHARE

    # -- carrying -----------------------------------------------------------------------------------------------------

    def start(self, request: Request, output_tokens: int, replica: int) -> None:
        """Send the tokens of ``request`` to ``replica``, which gets it when they have all arrived."""
        self.enter(request)
        size_bytes = self._request_bytes
        self._add_pending(self._entering[1], replica, size_bytes)
        point = self._entering[1]
        flow = self._network.start(self._points[point], self._gpus[replica], size_bytes, lambda flow: self._arrived(request.request_id, point))
        self._under_way[request.request_id] = OnTheWay(request, output_tokens, replica, flow)

    def _add_pending(self, point: int, replica: int, size_bytes: float) -> None:
        for channel, _ in self._routes[point][replica].channels:
            self._pending_bytes[channel.index] = max(0.0, self._pending_bytes.get(channel.index, 0.0) + size_bytes)

    def _arrived(self, request_id: int, point: int) -> None:
        request, output_tokens, replica, flow = self._under_way.pop(request_id)
        self._add_pending(point, replica, -flow.bytes)
        self._count(flow)
        self._cluster.delivered(request, output_tokens, replica)

    def abandon(self, request_id: int) -> bool:
        """Nobody waits for a request that is on its way: hand it over as it is, to be dropped there. False when it is not on its way."""
        entry = self._under_way.get(request_id)
        if entry is None:
            return False
        self._network.cancel(entry.flow)
        del self._under_way[request_id]
        for point, name in enumerate(self._points):
            if name == entry.flow.src:
                self._add_pending(point, entry.replica, -entry.flow.bytes)
        self._cluster.delivered(entry.request, entry.output_tokens, entry.replica)
        return True

    # -- accounts -----------------------------------------------------------------------------------------------------

    def _count(self, flow: Flow) -> None:
        duration_s = flow.finish_s - flow.start_s
        self._done_s.append(duration_s)
        if len(self._done_s) >= 4096:
            self._flush()
        if duration_s > 0:
            rates = self._rates
            rates[0] += 1
            difference = flow.bytes / duration_s - rates[1]
            rates[1] += difference / rates[0]
            rates[2] += difference * (flow.bytes / duration_s - rates[1])

    def _flush(self) -> None:
        self._times.add(np.array(self._done_s))
        self._done_s.clear()

    def report(self) -> dict[str, Any]:
        """Seconds from ingress to replica, and the swing of the transfers' throughput: its standard deviation over its mean."""
        self._flush()
        count, mean, squares = self._rates
        return {
            "delivery_s": self._times.summary(),
            "throughput_bytes_per_s": mean,
            "throughput_swing": math.sqrt(squares / count) / mean if count and mean else None,
        }
