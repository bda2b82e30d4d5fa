"""The graph of a topology: channels with a rate, and deterministic routes between GPUs, memories, drives and NICs.

Routes follow the paths that ``sim.paths`` finds on representative nodes, so a cluster of 128 nodes costs no more to route
than two. ``check_*`` refuse what a scenario can never do on a topology, by the path of the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hwmodels.links import link_bytes_per_s
from serving.errors import InputError, nearest
from serving.topology import Component, Topology, load_topology
from sim.paths import Path, PathFinder, Relation, named


class Channel(NamedTuple):
    """One shared resource: a direction of a link, a half-duplex link, or a component with a rate of its own."""

    index: int
    name: str
    bytes_per_s: float


class Route(NamedTuple):
    """What a transfer from one component to another occupies and what it costs before its first byte."""

    channels: tuple[tuple[Channel, int], ...]  # each with how often the route crosses it
    latency_s: float
    operation_s: float
    granule_bytes: int
    bytes_per_s: float  # of the narrowest channel, with nobody else on it


class Place(NamedTuple):
    """Where a named component is: kind of node, number of the node over all kinds, name inside the node."""

    node_kind: str
    node: int
    part: str


_Step = tuple[int, str, str, float]  # owner (here, there, their pods, all), link or component, direction, bytes/s


class _Plan(NamedTuple):
    """A route between two kinds of place, before real nodes fill it: steps with how often each is crossed."""

    steps: tuple[tuple[_Step, int], ...]
    latency_s: float
    operation_s: float
    granule_bytes: int
    bytes_per_s: float


class LinkGraph:
    """Components, channels and routes of one topology. Nothing in it changes but the cache of channels."""

    def __init__(self, topology: Topology) -> None:
        """Build and check the graph. Raises InputError for GPUs that cannot reach each other or their host memory."""
        self.topology = topology
        self.gpus: list[str] = []
        self._places: dict[str, Place] = {}
        self._parts: dict[str, dict[str, Component]] = {kind: named(node.components) for kind, node in topology.nodes.items()}
        self._channels: dict[tuple[str, int, str, str], Channel] = {}
        self._plans: dict[tuple[str, str, str, str, Relation], _Plan | None] = {}
        self._finder = PathFinder(topology)
        prefixed, number = topology.node_count > 1, 0
        for kind, node in topology.nodes.items():
            for copy in range(node.replicate):
                for part, facts in self._parts[kind].items():
                    name = f"{kind}{copy}.{part}" if prefixed else part
                    self._places[name] = Place(kind, number, part)
                    if facts.kind == "gpu":
                        self.gpus.append(name)
                number += 1
        self._check_reach()

    def _check_reach(self) -> None:
        """Check one pair of nodes of every relation; copies behave alike."""
        nodes: dict[str, list[int]] = {}
        for place in self._places.values():
            known = nodes.setdefault(place.node_kind, [])
            if not known or known[-1] != place.node:
                known.append(place.node)
        for kind, numbers in nodes.items():
            self._check_pair(kind, numbers[0], kind, numbers[0])
            for other, others in nodes.items():
                for same_pod in (True, False):
                    far = [n for n in others if n != numbers[0] and (self._pod(n) == self._pod(numbers[0])) is same_pod]
                    if far:
                        self._check_pair(kind, numbers[0], other, far[0])

    def _check_pair(self, kind_a: str, node_a: int, kind_b: str, node_b: int) -> None:
        same = node_a == node_b
        targets = self._of_kind(kind_b, "gpu") + (self._of_kind(kind_b, "host_memory") if same else [])
        for a in self._of_kind(kind_a, "gpu"):
            for b in targets:
                if not (same and a == b) and self._legs(Place(kind_a, node_a, a), Place(kind_b, node_b, b)) is None:
                    where = f"{self.topology.origin}:" + (f"nodes.{kind_a}.links" if same else "fabric.links")
                    raise InputError(
                        where, f"no route leads from {a} to {b}" + ("" if same else " of another node"), "link them or remove one"
                    )

    def _of_kind(self, node_kind: str, kind: str) -> list[str]:
        return [name for name, part in self._parts[node_kind].items() if part.kind == kind]

    def _pod(self, node: int) -> int:
        fabric = self.topology.fabric
        return node // fabric.nodes_per_pod if fabric is not None and fabric.nodes_per_pod else 0

    # --- components --------------------------------------------------------------------------------------------------

    def place(self, name: str, where: str = "topology") -> Place:
        """Return where the component ``name`` is. Raises InputError with the nearest name."""
        found = self._places.get(name)
        if found is None:
            raise InputError(where, f"the topology has no component '{name}'", nearest(name, list(self._places)[:64]))
        return found

    def component(self, name: str) -> Component:
        """Return the facts of the component ``name``. Raises InputError when there is none."""
        place = self.place(name)
        return self._parts[place.node_kind][place.part]

    def components(self, kind: str) -> list[str]:
        """Return the names of all node components of ``kind``, in file order."""
        return [name for name, place in self._places.items() if self._parts[place.node_kind][place.part].kind == kind]

    # --- routes ------------------------------------------------------------------------------------------------------

    def route(self, src: str, dst: str) -> Route:
        """Return the route of least latency, ties broken by component names. Raises InputError when there is none."""
        here, there = self.place(src), self.place(dst)
        plan = self._plan(here, there)
        if plan is None:
            raise InputError(f"{self.topology.origin}:links", f"no route leads from {src} to {dst}", "link them in the topology")
        owners = (("n", here.node), ("n", there.node), ("p", self._pod(here.node)), ("p", self._pod(there.node)), ("s", 0))
        channels = tuple((self._channel(owners[owner], key, direction, rate), times) for (owner, key, direction, rate), times in plan.steps)
        return Route(channels, plan.latency_s, plan.operation_s, plan.granule_bytes, plan.bytes_per_s)

    def channels(self) -> list[Channel]:
        """The channels of all routes asked for so far."""
        return list(self._channels.values())

    def latency_s(self, src: str, dst: str) -> float:
        """Seconds before the first byte from ``src`` reaches ``dst`` on idle links."""
        return self.route(src, dst).latency_s

    def capacity_bytes_per_s(self, src: str, dst: str, share: float = 0.8) -> float:
        """Rate a router may plan with: ``share`` of the narrowest link on the route (system A12 plans with 0.8)."""
        return share * self.route(src, dst).bytes_per_s

    def media(self, src: str, dst: str) -> set[str]:
        """Kinds of link on the route (nvlink, pcie, memory, ...); empty when there is none."""
        legs = self._legs(self.place(src), self.place(dst)) or []
        return {self.topology.link_types[hop.type].medium for _, _, path in legs for hop in path.hops}

    def legs(self, src: str, dst: str) -> int:
        """Legs of the route: 1 direct, more when staged in host memory, 0 when there is none."""
        return len(self._legs(self.place(src), self.place(dst)) or [])

    def _legs(self, here: Place, there: Place) -> list[tuple[Place, Place, Path]] | None:
        """One leg, or several that stage in host memory where GPUs cannot address each other over PCIe."""
        direct = self._path(here, there)
        if direct is None:
            return None
        over_pcie = any(self.topology.link_types[hop.type].medium == "pcie" for hop in direct.hops)
        stops = [here, there]
        if over_pcie and not self.topology.peer_to_peer:
            stops = [here, *self._staging(here), *self._staging(there), there]
            stops = [stop for i, stop in enumerate(stops) if i == 0 or stop != stops[i - 1]]
        legs = [(a, b, self._path(a, b)) for a, b in pairwise(stops)]
        return None if any(path is None for _, _, path in legs) else legs

    def _staging(self, end: Place) -> list[Place]:
        """The host memory nearest to ``end`` when that is a GPU: where its traffic is staged."""
        if self._parts[end.node_kind][end.part].kind != "gpu":
            return []
        memories = [end._replace(part=part) for part in self._of_kind(end.node_kind, "host_memory")]
        near = [(path.latency_s, memory) for memory in memories if (path := self._path(end, memory)) is not None]
        return [min(near)[1]] if near else []

    def _path(self, here: Place, there: Place) -> Path | None:
        return self._finder.path(here.node_kind, here.part, there.node_kind, there.part, self._relation(here, there))

    def _relation(self, here: Place, there: Place) -> Relation:
        if here.node == there.node:
            return "node"
        return "pod" if self._pod(here.node) == self._pod(there.node) else "far"

    def _plan(self, here: Place, there: Place) -> _Plan | None:
        """The route of every pair of nodes in this relation, worked out once."""
        key = (here.node_kind, here.part, there.node_kind, there.part, self._relation(here, there))
        if key not in self._plans:
            legs = self._legs(here, there)
            self._plans[key] = None if legs is None else self._make_plan(legs, here, there)
        return self._plans[key]

    def _make_plan(self, legs: list[tuple[Place, Place, Path]], here: Place, there: Place) -> _Plan:
        crossings: dict[_Step, int] = {}
        for start, end, path in legs:
            slots = {"A": 0 if start.node == here.node else 1, "B": 1, "PA": 2, "PB": 3, "S": 4}
            for step in self._crossed(start, end, path, slots):
                crossings[step] = crossings.get(step, 0) + 1
        types = [self.topology.link_types[hop.type] for _, _, path in legs for hop in path.hops]
        return _Plan(
            steps=tuple(crossings.items()),
            latency_s=sum(path.latency_s for _, _, path in legs),
            operation_s=max((kind.operation_s for kind in types), default=0.0),
            granule_bytes=max((kind.granule_bytes for kind in types), default=1),
            bytes_per_s=min((step[3] / times for step, times in crossings.items()), default=float("inf")),
        )

    def _crossed(self, here: Place, there: Place, path: Path, slots: dict[str, int]) -> list[_Step]:
        """The steps of a path: its links, and the components on it that have a rate of their own."""
        kinds = {"A": self._parts[here.node_kind], "B": self._parts[there.node_kind]}
        if self.topology.fabric is not None:
            kinds |= {"PA": named(self.topology.fabric.per_pod), "S": named(self.topology.fabric.shared)}
            kinds["PB"] = kinds["PA"]
        rates = {name: link_bytes_per_s(kind, self.topology.iommu) for name, kind in self.topology.link_types.items()}
        links = [(slots[hop.slot], hop.key, hop.direction, rates[hop.type]) for hop in path.hops]
        parts = [(slots[slot], part, "both", kinds[slot][part].bytes_per_s) for slot, part in path.through]
        return links + [step for step in parts if step[3] is not None]

    def _channel(self, owner: tuple[str, int], key: str, direction: str, bytes_per_s: float) -> Channel:
        identity = (*owner, key, direction)
        if identity not in self._channels:
            prefix = (
                "" if self.topology.node_count == 1 else {"n": f"node {owner[1]}: ", "p": f"pod {owner[1]}: ", "s": "fabric: "}[owner[0]]
            )
            arrow = {"out": " >", "back": " <", "both": ""}[direction]
            self._channels[identity] = Channel(len(self._channels), f"{prefix}{key}{arrow}", bytes_per_s)
        return self._channels[identity]


def build(name_or_path: str, nodes: int | None = None, where: str = "cluster.topology") -> LinkGraph:
    """Load a topology by catalogue name or file and build its graph; ``nodes`` overrides how many machines it has."""
    return LinkGraph(load_topology(name_or_path, where, nodes))


def check_tensor_parallel(graph: LinkGraph, group: Sequence[str], where: str = "cluster.tensor_parallel") -> None:
    """Refuse a tensor-parallel group across a missing link: its GPUs must lie in one node and reach each other directly.

    Raises InputError naming the first pair at fault.
    """
    places = [graph.place(name, where) for name in group]
    for a, first in zip(group, places):
        for b, second in zip(group, places):
            if first.node != second.node:
                raise InputError(where, f"{a} and {b} are in different nodes: no scale-up link joins them", "keep a group inside one node")
            if a != b and graph.legs(a, b) != 1:
                raise InputError(where, f"{a} and {b} have no direct link: their traffic is staged in host memory", "use a smaller group")


def check_tiers(graph: LinkGraph, block_bytes: int, where: str = "kv_cache.tiers") -> None:
    """Refuse host memories and drives that cannot hold one KV block. Raises InputError with the tier's place in the file."""
    for kind, node in graph.topology.nodes.items():
        for stem, part in node.components.items():
            if part.kind in ("host_memory", "nvme") and part.capacity_bytes is not None and part.capacity_bytes < block_bytes:
                path = f"{graph.topology.origin}:nodes.{kind}.components.{stem}.capacity_bytes"
                raise InputError(
                    path, f"the tier holds {part.capacity_bytes} bytes, less than one KV block of {block_bytes}", f"needed by {where}"
                )
