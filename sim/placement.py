"""Which GPUs of a topology each replica gets, and what the links between them are worth.

GPUs are handed out in the order of the file. A stage stays inside one node where it fits, a tensor-parallel group always; GPUs of a
node that are too few for the next group are left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from hwmodels import collectives, group_links
from hwmodels.collectives import Collectives
from hwmodels.group_links import GroupLinks
from hwmodels.patterns import LinkRate
from serving.catalog import Gpu
from serving.errors import InputError, nearest
from serving.layout import Layout
from serving.scenario.model import Cluster
from serving.topology import load_topology
from sim.topology import LinkGraph, check_tensor_parallel


class Wanted(NamedTuple):
    """``count`` replicas of one kind; ``where`` is the key that a shortage of GPUs is blamed on."""

    layout: Layout
    gpu: Gpu
    count: int
    where: str = "cluster.replicas"


def place(graph: LinkGraph, wanted: Sequence[Wanted]) -> list[list[list[str]]]:
    """GPU names of every replica of each kind, stage by stage.

    Raises InputError when the topology has no GPUs of that kind, or too few, or when a group would cross a missing link.
    """
    nodes = _nodes(graph)
    taken: dict[int, int] = {}
    return [_place_kind(graph, nodes, taken, kind) for kind in wanted]


def of_scenario(cluster: Cluster, layout: Layout, gpu: Gpu) -> tuple[LinkGraph | None, list[list[str]]]:
    """The graph of a cluster's topology and the GPUs of every replica on it, as many as there may ever be; nothing without one."""
    if cluster.topology is None:
        return None, []
    graph = LinkGraph(load_topology(cluster.topology, nodes=cluster.nodes))
    replicas = cluster.replicas if cluster.autoscaling is None else cluster.autoscaling.maximum
    tenants = 1 if cluster.tenancy is None else cluster.tenancy.tenants
    groups = place(graph, [Wanted(layout, gpu, replicas // tenants)])[0]
    return graph, [gpus for gpus in groups for _ in range(tenants)]


def _nodes(graph: LinkGraph) -> list[tuple[str | None, list[str]]]:
    """GPUs of each node, with what they are."""
    grouped = [list(members) for _, members in groupby(graph.gpus, key=lambda name: graph.place(name).node)]
    return [(graph.component(members[0]).gpu, members) for members in grouped]


def _place_kind(graph: LinkGraph, nodes: list[tuple[str | None, list[str]]], taken: dict[int, int], kind: Wanted) -> list[list[str]]:
    layout, name = kind.layout, kind.gpu.name
    fitting = [(index, members) for index, (gpu, members) in enumerate(nodes) if gpu in (None, name)]
    if not fitting:
        known = sorted({gpu for gpu, _ in nodes if gpu is not None})
        raise InputError("cluster.gpu", f"the topology {graph.topology.name} has no {name}", nearest(name, known))
    largest = max(len(members) for _, members in fitting)
    unit = layout.stage_gpus if layout.stage_gpus <= largest else layout.tensor_parallel
    unit = min(unit, largest)  # a group larger than any node is refused below, with the pair at fault
    free = _units(fitting, taken, unit)
    placed = []
    for _ in range(kind.count):
        gpus: list[str] = []
        while len(gpus) < layout.gpus:
            more = next(free, None)
            if more is None:
                wanted, there = kind.count * layout.gpus, sum(len(members) for _, members in fitting)
                raise InputError(
                    kind.where, f"{kind.count} replicas of {layout.gpus} GPUs need {wanted} GPUs; the topology has {there} {name}",
                    "raise cluster.nodes or use fewer replicas",
                )  # fmt: skip
            gpus += more
        placed.append(gpus[: layout.gpus])
    _check_groups(graph, layout, placed)
    return placed


def _units(fitting: list[tuple[int, list[str]]], taken: dict[int, int], unit: int) -> Iterator[list[str]]:
    """Runs of ``unit`` GPUs of one node that are still free; marks them as taken."""
    for index, members in fitting:
        while taken.get(index, 0) + unit <= len(members):
            begin = taken.get(index, 0)
            taken[index] = begin + unit
            yield members[begin : begin + unit]


def _check_groups(graph: LinkGraph, layout: Layout, placed: list[list[str]]) -> None:
    """Check each kind of tensor-parallel group once: nodes of one kind are alike."""
    seen: dict[tuple, None] = {}
    size = layout.tensor_parallel
    for gpus in placed if size > 1 else ():
        for begin in range(0, len(gpus), size):
            group = gpus[begin : begin + size]
            places = [graph.place(name) for name in group]
            kind = tuple((place.node_kind, place.node - places[0].node, place.part) for place in places)
            if kind not in seen:
                check_tensor_parallel(graph, group)
                seen[kind] = None


# -- links ----------------------------------------------------------------------------------------------------------------


def links_of(graph: LinkGraph, gpus: Sequence[str], layout: Layout, gpu: Gpu) -> GroupLinks:
    """What the links between the GPUs of one replica are worth, each at the rate it has when all its partners send at once."""
    stage = gpus[: layout.stage_gpus]
    group = stage[: layout.tensor_parallel]
    near = [name for name in stage if graph.place(name).node == graph.place(stage[0]).node]
    far = [name for name in stage if name not in near]
    across = shared_rate(graph, list(zip(near, far))) if far else None
    return GroupLinks(layout.tensor_parallel, _inside(graph, near if layout.data > 1 else group, gpu), _hop(graph, gpus, layout, gpu), len(near), across)


def _inside(graph: LinkGraph, group: Sequence[str], gpu: Gpu) -> Collectives:
    """Collectives as measured for this GPU where the group uses its own kind of link, else by the rate of the routes."""
    if len(group) < 2:
        return _from_link(gpu.name, gpu.link.bytes_per_s * gpu.link.efficiency, gpu.link.latency_s, True)
    ring = list(zip(group, [*group[1:], group[0]]))
    own = {"nvlink"} if gpu.scale_up is not None else {"pcie"}
    measured = group_links.fitted(gpu)
    if measured is not None and all(graph.media(a, b) <= own for a, b in ring):
        return measured
    rate = shared_rate(graph, ring)
    return _from_link(f"{graph.topology.name} {gpu.name}", rate.bytes_per_s, rate.latency_s, graph.topology.peer_to_peer)


def _hop(graph: LinkGraph, gpus: Sequence[str], layout: Layout, gpu: Gpu) -> LinkRate:
    """The slowest link to a partner: the same rank of the next stage, or of the next ring rank."""
    size, rates = layout.stage_gpus, []
    for begin in range(size, len(gpus), size):
        rates.append(shared_rate(graph, list(zip(gpus[begin - size : begin], gpus[begin : begin + size]))))
    if layout.ring > 1:
        step = layout.tensor_parallel
        stage = list(gpus[:size])
        rates.append(shared_rate(graph, list(zip(stage, stage[step:] + stage[:step]))))
    if not rates:
        return LinkRate(gpu.link.bytes_per_s * gpu.link.efficiency, gpu.link.latency_s)
    return LinkRate(min(rate.bytes_per_s for rate in rates), max(rate.latency_s for rate in rates))


def shared_rate(graph: LinkGraph, pairs: Sequence[tuple[str, str]]) -> LinkRate:
    """Bytes per second that each of ``pairs`` gets when all send at once, at the narrowest channel; and the longest latency."""
    routes = [graph.route(a, b) for a, b in pairs]
    crossings: dict[int, int] = {}
    for route in routes:
        for channel, times in route.channels:
            crossings[channel.index] = crossings.get(channel.index, 0) + times
    rate = min(channel.bytes_per_s / crossings[channel.index] for route in routes for channel, _ in route.channels)
    return LinkRate(rate, max(route.latency_s for route in routes))


@lru_cache(maxsize=256)
def _from_link(name: str, bytes_per_s: float, latency_s: float, peer_to_peer: bool) -> Collectives:
    return collectives.from_link(name, bytes_per_s, latency_s, peer_to_peer)
