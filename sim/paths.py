"""Paths of least latency on representative nodes of a topology: what ``sim.topology`` turns into routes of real nodes.

Machines of one kind are copies, so a path depends only on the kinds of both nodes and on their relation. The search graph
has slots: A and B, the two nodes; PA and PB, the fabric switches of their pods; S, what all pods share.
"""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple

from hwmodels.links import link_latency_s
from serving.topology import Component, Link, Topology, fabric_links, node_links

TRANSIT = ("switch", "root_complex", "nic")  # what a path may pass through; memories, drives and GPUs only end one
Relation = Literal["node", "pod", "far"]
Vertex = tuple[str, str]  # slot, component name


class Hop(NamedTuple):
    """One link crossed. A channel is known by the node or pod that fills ``slot``, by ``key`` and by ``direction``."""

    to: Vertex
    slot: str
    key: str
    direction: str  # out, back, or both where the link is half duplex
    type: str


class Path(NamedTuple):
    """Hops from one component to another, the vertices on the way (both ends included), and the summed latency."""

    hops: tuple[Hop, ...]
    through: tuple[Vertex, ...]
    latency_s: float


class PathFinder:
    """Searches each (component, kind of node, relation) once and keeps the result."""

    def __init__(self, topology: Topology) -> None:
        """Expand the links of ``topology``. Raises InputError for unknown ends, types, and ports used twice."""
        self._topology = topology
        self._links: dict[str, list[Link]] = {kind: node_links(topology, kind) for kind in topology.nodes}
        self._fabric = fabric_links(topology)
        self._found: dict[tuple[str, str, str, Relation], dict[str, Path]] = {}

    def path(self, kind_a: str, part_a: str, kind_b: str, part_b: str, relation: Relation) -> Path | None:
        """Return the path of least latency, ties broken by the names on the way; None when there is none."""
        key = (kind_a, part_a, kind_b, relation)
        if key not in self._found:
            self._found[key] = self._search(kind_a, part_a, kind_b, relation)
        return self._found[key].get(part_b)

    def _search(self, kind_a: str, part_a: str, kind_b: str, relation: Relation) -> dict[str, Path]:
        """Dijkstra from one component to all of the other end's node."""
        slots = self._slots(kind_a, kind_b, relation)
        transit = {(slot, name) for slot, parts in slots.items() for name, part in parts.items() if part.kind in TRANSIT}
        edges = self._edges({"A": kind_a} if relation == "node" else {"A": kind_a, "B": kind_b}, slots, relation)
        start: Vertex = ("A", part_a)
        queue: list[tuple[float, tuple[Vertex, ...], tuple[Hop, ...]]] = [(0.0, (start,), ())]
        done: dict[Vertex, Path] = {}
        while queue:
            latency_s, through, hops = heapq.heappop(queue)
            vertex = through[-1]
            if vertex in done:
                continue
            done[vertex] = Path(hops, through, latency_s)
            if vertex == start or vertex in transit:
                for hop in edges.get(vertex, []):
                    if hop.to not in done:
                        heapq.heappush(queue, (latency_s + self._latency_s(hop.type), (*through, hop.to), (*hops, hop)))
        target = "A" if relation == "node" else "B"
        return {name: path for (slot, name), path in done.items() if slot == target}

    def _latency_s(self, link_type: str) -> float:
        return link_latency_s(self._topology.link_types[link_type], self._topology.iommu)

    def _slots(self, kind_a: str, kind_b: str, relation: Relation) -> dict[str, dict[str, Component]]:
        """Components by name in every slot that this relation has."""
        slots = {"A": named(self._topology.nodes[kind_a].components)}
        if relation != "node":
            slots["B"] = named(self._topology.nodes[kind_b].components)
            if self._topology.fabric is not None:
                slots["PA"] = named(self._topology.fabric.per_pod)
                slots["S"] = named(self._topology.fabric.shared)
                if relation == "far":
                    slots["PB"] = slots["PA"]
        return slots

    def _edges(self, nodes: dict[str, str], slots: dict[str, dict[str, Component]], relation: Relation) -> dict[Vertex, list[Hop]]:
        edges: dict[Vertex, list[Hop]] = {}

        def join(a: Vertex, b: Vertex, slot: str, link: Link) -> None:
            half = self._topology.link_types[link.type].duplex == "half"
            key = f"{link.a}--{link.b}"
            edges.setdefault(a, []).append(Hop(b, slot, key, "both" if half else "out", link.type))
            edges.setdefault(b, []).append(Hop(a, slot, key, "both" if half else "back", link.type))

        for slot, kind in nodes.items():
            for link in self._links[kind]:
                join((slot, link.a), (slot, link.b), slot, link)
        if relation == "node":
            return edges
        pods = {"A": "PA", "B": "PB" if relation == "far" else "PA"}
        joinable = list(pods.items()) + [(node, "S") for node in pods]
        joinable += [(pod, other) for pod in dict.fromkeys(pods.values()) for other in (pod, "S")] + [("S", "S")]
        for link in self._fabric:
            for owner, other in joinable:  # the owner's slot tells the copies of a link apart
                for a, b in dict.fromkeys([(owner, other), (other, owner)]):
                    if link.a in slots.get(a, ()) and link.b in slots.get(b, ()):
                        join((a, link.a), (b, link.b), owner, link)
        return edges


def named(parts: dict[str, Component]) -> dict[str, Component]:
    """Expand components to their numbered names, in file order."""
    return {f"{stem}{i}": part for stem, part in parts.items() for i in range(part.count)}
