"""Facts about how GPUs, host memory, storage and NICs are wired: link types, nodes, the fabric between nodes.

A topology file names the components of a node, joins them by links of a declared type, repeats the node and joins the
copies by a fabric. Nothing here routes or shares bandwidth: ``sim.topology`` builds the graph, ``sim.network`` the flows.
Rates are bytes per second **one way** unless a link is half duplex, sizes bytes, times seconds.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from serving.catalog import _first_mistake as first_mistake
from serving.catalog import read_entry
from serving.errors import InputError, nearest

FACT = ConfigDict(extra="forbid")
Share = Annotated[float, Field(gt=0, le=1)]
Kind = Literal["gpu", "switch", "root_complex", "host_memory", "nvme", "nic"]
_END = re.compile(r"^(?P<stem>[a-z][a-z0-9_]*?)(?P<index>\d+|\[(?P<low>\d+)-(?P<high>\d+)\])?(?::(?P<port>\d+))?$")


@dataclass(frozen=True, slots=True, config=FACT)
class Pcie:
    """What fixes the raw rate of a PCIe link: generation, lanes, and the payload and overhead of one packet in bytes."""

    generation: Literal[3, 4, 5, 6]
    lanes: Literal[1, 2, 4, 8, 16]
    max_payload_bytes: PositiveInt = 256
    packet_overhead_bytes: PositiveInt = 24


@dataclass(frozen=True, slots=True, config=FACT)
class LinkType:
    """One kind of link. Either ``bytes_per_s`` or ``pcie`` gives its raw rate; ``efficiency`` is the measured share of it.

    A transfer of n operations costs ``latency_s + n * operation_s`` before its bytes move. ``iommu_efficiency`` and
    ``iommu_latency_s`` apply where the topology says ``iommu: true``. Bytes move in granules of ``granule_bytes``, so
    pieces that start off a granule boundary move more than they hold.
    """

    medium: Literal["nvlink", "pcie", "memory", "storage", "network"]
    source: str
    latency_s: NonNegativeFloat
    bytes_per_s: PositiveFloat | None = None
    pcie: Pcie | None = None
    efficiency: Share = 1.0
    operation_s: NonNegativeFloat = 0.0
    duplex: Literal["full", "half"] = "full"
    iommu_efficiency: Share = 1.0
    iommu_latency_s: NonNegativeFloat = 0.0
    granule_bytes: PositiveInt = 1

    @model_validator(mode="after")
    def _one_rate(self) -> LinkType:
        if (self.bytes_per_s is None) == (self.pcie is None):
            raise ValueError("give exactly one of bytes_per_s and pcie")
        return self


@dataclass(frozen=True, slots=True, config=FACT)
class Component:
    """``count`` like components, named stem0, stem1, ... ``bytes_per_s`` bounds all traffic through one of them together."""

    kind: Kind
    count: PositiveInt = 1
    capacity_bytes: PositiveInt | None = None
    bytes_per_s: PositiveFloat | None = None
    gpu: str | None = None  # catalogue name, for kind gpu
    source: str = ""


@dataclass(frozen=True, slots=True, config=FACT)
class Wire:
    """Links of one type. An end is ``gpu0``, ``gpu[0-3]`` or, with a port, ``gpu0:1``; two ranges pair up in order."""

    ends: tuple[str, str]
    type: str


@dataclass(frozen=True, slots=True, config=FACT)
class Node:
    """The wiring of one machine, and how many such machines there are."""

    components: dict[str, Component]
    links: list[Wire]
    replicate: PositiveInt = 1


@dataclass(frozen=True, slots=True, config=FACT)
class Fabric:
    """What joins the nodes: its switches belong to a pod (``per_pod``) of ``nodes_per_pod`` nodes, or to all of them (``shared``).

    A link end that names a component of a node stands for that component in every node that has it.
    """

    links: list[Wire]
    per_pod: dict[str, Component] = field(default_factory=dict)
    shared: dict[str, Component] = field(default_factory=dict)
    nodes_per_pod: PositiveInt | None = None  # null: one pod


@dataclass(frozen=True, slots=True, config=FACT)
class Topology:
    """A whole topology file. ``peer_to_peer: false`` sends GPU traffic over PCIe through host memory."""

    name: str
    description: str
    link_types: dict[str, LinkType]
    nodes: dict[str, Node]
    sources: dict[str, str]
    fabric: Fabric | None = None
    iommu: bool = False
    peer_to_peer: bool = True
    origin: str = ""  # the file, for messages; filled by load_topology

    @property
    def node_count(self) -> int:
        """Number of machines over all node kinds."""
        return sum(node.replicate for node in self.nodes.values())


class Link(NamedTuple):
    """One link after expansion: its two ends, its type name, and the place in the file that declared it."""

    a: str
    b: str
    type: str
    where: str


def load_topology(name_or_path: str, where: str = "cluster.topology", nodes: int | None = None) -> Topology:
    """Return a topology by catalogue name or file, validated; ``nodes`` overrides ``replicate`` of its only node kind.

    Raises InputError with the dotted path of the mistake.
    """
    data, origin = read_entry("topologies", name_or_path, where)
    return parse_topology(data, origin, nodes)


def parse_topology(data: dict[str, Any], origin: str = "topology", nodes: int | None = None) -> Topology:
    """Validate a topology given as a mapping. Raises InputError(``origin``:dotted.path, ...)."""
    try:
        topology = replace(TypeAdapter(Topology).validate_python(data), origin=origin)
    except ValidationError as error:
        raise first_mistake(error, origin, Topology) from None
    if nodes is not None:
        if len(topology.nodes) != 1 or nodes < 1:
            raise InputError(f"{origin}:nodes", "the number of nodes can be overridden for one node kind, with at least one node")
        topology = replace(topology, nodes={name: replace(node, replicate=nodes) for name, node in topology.nodes.items()})
    for name, node in topology.nodes.items():
        node_links(topology, name)
        if not any(part.kind == "gpu" for part in node.components.values()):
            raise InputError(f"{origin}:nodes.{name}.components", "has no component of kind gpu")
    if topology.fabric is not None:
        fabric_links(topology)
    return topology


def join_sites(links: list[tuple[int, int, float, float]], sites: int) -> Topology:
    """The topology of ``sites`` places named site0, site1, ... joined by ``links``: (one end, other end, latency in s, bytes/s one way)."""
    kinds = {f"link{i}": LinkType("network", "the scenario", latency_s, bytes_per_s) for i, (_, _, latency_s, bytes_per_s) in enumerate(links)}
    wires = [Wire((f"site{a}", f"site{b}"), f"link{i}") for i, (a, b, _, _) in enumerate(links)]
    return Topology("sites", "", kinds, {"all": Node({"site": Component("switch", sites)}, wires)}, {}, origin="sites")


def component_names(parts: dict[str, Component]) -> list[str]:
    """Expanded names (``gpu0``, ``gpu1``, ...) in file order."""
    return [f"{stem}{i}" for stem, part in parts.items() for i in range(part.count)]


def node_links(topology: Topology, node: str) -> list[Link]:
    """Return the links inside one machine of kind ``node``. Raises InputError for unknown ends, types and ports used twice."""
    parts = topology.nodes[node].components
    return _expand(topology, topology.nodes[node].links, component_names(parts), f"nodes.{node}.links")


def fabric_links(topology: Topology) -> list[Link]:
    """Return the links of the fabric; ends in a node stay unprefixed. Raises InputError as ``node_links`` does."""
    fabric = topology.fabric
    if fabric is None:
        return []
    known = component_names(fabric.per_pod) + component_names(fabric.shared)
    inside = [name for node in topology.nodes.values() for name in component_names(node.components)]
    clash = sorted(set(known) & set(inside))
    if clash:
        raise InputError(f"{topology.origin}:fabric", f"'{clash[0]}' names a component both of a node and of the fabric")
    return _expand(topology, fabric.links, known + inside, "fabric.links")


def _expand(topology: Topology, wires: list[Wire], known: list[str], path: str) -> list[Link]:
    links: list[Link] = []
    used: dict[str, str] = {}  # port, or pair of ends without ports -> where it was used
    for i, wire in enumerate(wires):
        where = f"{topology.origin}:{path}.{i}"
        if wire.type not in topology.link_types:
            raise InputError(f"{where}.type", f"there is no link type '{wire.type}'", nearest(wire.type, topology.link_types))
        left, right = (_ends(end, known, f"{where}.ends.{side}") for side, end in enumerate(wire.ends))
        if len(left) != len(right) and 1 not in (len(left), len(right)):
            raise InputError(
                f"{where}.ends", f"pairs {len(left)} components with {len(right)}", "ranges must be equally long, or one end single"
            )
        count = max(len(left), len(right))
        for (a, port_a), (b, port_b) in zip(left * (count // len(left)), right * (count // len(right))):
            if a == b:
                raise InputError(f"{where}.ends", f"links '{a}' to itself")
            for claim in _claims(a, port_a, b, port_b):
                if claim in used:
                    raise InputError(f"{where}.ends", f"{claim} is already used by {used[claim]}", "every port takes one link")
                used[claim] = f"{path}.{i}"
            links.append(Link(a, b, wire.type, where))
    return links


def _claims(a: str, port_a: str | None, b: str, port_b: str | None) -> list[str]:
    """What a link occupies: the ports it names, or else the pair of its ends."""
    ports = [f"port {name}:{port}" for name, port in ((a, port_a), (b, port_b)) if port is not None]
    return ports or [f"the port between {min(a, b)} and {max(a, b)}"]


def _ends(text: str, known: list[str], where: str) -> list[tuple[str, str | None]]:
    match = _END.match(text)
    if match is None:
        raise InputError(where, f"'{text}' is no component", "write gpu0, gpu[0-3] or gpu0:1")
    stem, port = match["stem"], match["port"]
    if match["low"] is not None:
        names = [f"{stem}{i}" for i in range(int(match["low"]), int(match["high"]) + 1)]
    else:
        names = [stem + (match["index"] or "0")]
    for name in names:
        if name not in known:
            raise InputError(where, f"there is no component '{name}'", nearest(name, known))
    return [(name, port) for name in names]
