"""The catalogue of topologies, routes through them, and mistakes that are refused by the path that leads to them."""

from __future__ import annotations

import copy

import pytest
import yaml

from hwmodels.links import link_bytes_per_s
from serving.catalog import CATALOG, load_gpu, names
from serving.errors import InputError
from serving.topology import load_topology, parse_topology
from sim.topology import LinkGraph, build, check_tensor_parallel, check_tiers

NAMES = ["dgx-a100", "dgx-b200", "dgx-h100", "dgx-h200", "l40s-box", "pcie-8gpu", "rtx4090-box", "two-node-rdma"]


def raw(name: str) -> dict:
    return yaml.safe_load((CATALOG / "topologies" / f"{name}.yaml").read_text())


def test_the_catalogue_is_whole():
    assert set(NAMES) <= set(names("topologies"))


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_has_sources_efficiencies_and_gpus_of_the_catalogue(name):
    topology = load_topology(name)
    for link in topology.link_types.values():
        assert len(link.source) > 20
        raw_rate = link.bytes_per_s or float("inf")
        assert 0 < link_bytes_per_s(link) <= raw_rate
    for node in topology.nodes.values():
        for part in node.components.values():
            if part.kind == "gpu":
                assert load_gpu(part.gpu).pcie.bytes_per_s > 0
    graph = LinkGraph(topology)
    assert len(graph.gpus) == sum(
        n.replicate * sum(p.count for p in n.components.values() if p.kind == "gpu") for n in topology.nodes.values()
    )


def test_gpus_meet_over_nvlink_and_leave_by_their_own_nic():
    graph = build("dgx-h100", nodes=64)
    assert [channel.name for channel, _ in graph.route("node0.gpu0", "node0.gpu5").channels] == [
        "node 0: gpu0--nvswitch0 >",
        "node 0: gpu5--nvswitch0 <",
    ]
    near = graph.route("node0.gpu3", "node1.gpu3")  # same rail, same pod: no spine
    assert [c.name for c, _ in near.channels if "leaf" in c.name] == ["node 0: nic3--leaf3 >", "node 1: nic3--leaf3 <"]
    far = graph.route("node0.gpu3", "node63.gpu3")
    assert [c.name for c, _ in far.channels if "spine" in c.name] == ["pod 0: leaf3--spine0 >", "pod 1: leaf3--spine0 <"]
    assert near.latency_s < far.latency_s


def test_routes_are_the_same_both_ways_round_and_on_every_copy():
    graph = build("dgx-h100", nodes=3)
    there, back = graph.route("node0.gpu1", "node2.gpu6"), graph.route("node2.gpu6", "node0.gpu1")
    assert there.latency_s == pytest.approx(back.latency_s)
    assert len(there.channels) == len(back.channels)
    assert not {c.index for c, _ in there.channels} & {c.index for c, _ in back.channels}  # full duplex: other directions
    other = graph.route("node1.gpu1", "node2.gpu6")
    assert [c.name.split(": ")[1] for c, _ in other.channels] == [c.name.split(": ")[1] for c, _ in there.channels]


def test_gpus_without_peer_to_peer_stage_in_host_memory():
    graph = build("rtx4090-box")
    route = graph.route("gpu0", "gpu3")
    assert {channel.name: times for channel, times in route.channels} == {"gpu0--root0 >": 1, "root0--dram0": 2, "gpu3--root0 <": 1}
    with pytest.raises(InputError, match=r"cluster.tensor_parallel: gpu0 and gpu1 have no direct link"):
        check_tensor_parallel(graph, ["gpu0", "gpu1"])


def test_replicate_makes_a_cluster_of_1024_gpus():
    graph = build("dgx-h100", nodes=128)
    assert len(graph.gpus) == 1024 and graph.gpus[-1] == "node127.gpu7"
    assert len(graph.components("host_memory")) == 256
    assert graph.component("node5.dram1").capacity_bytes == 1 << 40


def test_two_kinds_of_node_share_a_fabric():
    data = raw("dgx-h100")
    data["nodes"] = {"prefill": data["nodes"]["node"], "decode": raw("dgx-a100")["nodes"]["node"]}
    data["link_types"] |= raw("dgx-a100")["link_types"]
    graph = LinkGraph(parse_topology(data))
    assert graph.gpus[0] == "prefill0.gpu0" and graph.gpus[-1] == "decode0.gpu7"
    assert graph.route("prefill0.gpu0", "decode0.gpu0").bytes_per_s == pytest.approx(25e9, rel=0.01)  # the slower side's PCIe


def test_a_tensor_parallel_group_must_stay_in_a_node():
    graph = build("two-node-rdma")
    check_tensor_parallel(graph, graph.gpus[:8])
    with pytest.raises(InputError, match=r"node0.gpu0 and node1.gpu0 are in different nodes"):
        check_tensor_parallel(graph, [graph.gpus[0], graph.gpus[8]])


def test_a_tier_smaller_than_a_block_is_refused_by_its_place():
    data = raw("l40s-box")
    data["nodes"]["node"]["components"]["dram"]["capacity_bytes"] = 1024
    graph = LinkGraph(parse_topology(data, "mine.yaml"))
    with pytest.raises(
        InputError, match=r"mine.yaml:nodes.node.components.dram.capacity_bytes: the tier holds 1024 bytes, less than one KV block of 2048"
    ):
        check_tiers(graph, 2048)


def spoil(change) -> dict:
    data = copy.deepcopy(raw("l40s-box"))
    change(data)
    return data


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(data):
        for step in path:
            data = data[step]
        data[last] = value

    return change


MISTAKES = {
    "zero bandwidth": (set_in("link_types", "upi", "bytes_per_s", 0), r"t.yaml:link_types.upi.bytes_per_s: input should be greater than 0"),
    "no rate": (set_in("link_types", "upi", "bytes_per_s", None), r"t.yaml:link_types.upi: give exactly one of bytes_per_s and pcie"),
    "efficiency above one": (set_in("link_types", "upi", "efficiency", 1.2), r"t.yaml:link_types.upi.efficiency"),
    "unknown key": (set_in("link_types", "upi", "bandwith", 3), r"t.yaml:link_types.upi.bandwith: unknown key"),
    "no source": (lambda d: d["link_types"]["upi"].pop("source"), r"t.yaml:link_types.upi.source"),
    "unknown type": (
        set_in("nodes", "node", "links", 0, "type", "pcie4_x61"),
        r"t.yaml:nodes.node.links.0.type: .* \(did you mean 'pcie4_x16'\?\)",
    ),
    "unknown end": (
        set_in("nodes", "node", "links", 0, "ends", ["gpu[0-9]", "root0"]),
        r"t.yaml:nodes.node.links.0.ends.0: there is no component 'gpu8'",
    ),
    "malformed end": (
        set_in("nodes", "node", "links", 0, "ends", ["GPU!", "root0"]),
        r"t.yaml:nodes.node.links.0.ends.0: 'GPU!' is no component",
    ),
    "to itself": (
        set_in("nodes", "node", "links", 0, "ends", ["root0", "root0"]),
        r"t.yaml:nodes.node.links.0.ends: links 'root0' to itself",
    ),
    "unequal ranges": (
        set_in("nodes", "node", "links", 0, "ends", ["gpu[0-3]", "root[0-1]"]),
        r"t.yaml:nodes.node.links.0.ends: pairs 4 components with 2",
    ),
    "linked twice": (
        lambda d: d["nodes"]["node"]["links"].append({"ends": ["gpu0", "root0"], "type": "upi"}),
        r"links.\d.ends: the port between gpu0 and root0 is already used by nodes.node.links.0",
    ),
    "duplicate port": (
        lambda d: d["nodes"]["node"]["links"].extend(
            [{"ends": ["gpu0:7", "root1"], "type": "upi"}, {"ends": ["gpu0:7", "gpu5"], "type": "upi"}]
        ),
        r"ends: port gpu0:7 is already used by nodes.node.links.\d",
    ),
    "unreachable gpu": (lambda d: d["nodes"]["node"]["links"].pop(1), r"t.yaml:nodes.node.links: no route leads from gpu0 to gpu4"),
    "no gpus": (
        lambda d: d["nodes"]["node"]["components"]["gpu"].update(kind="nvme"),
        r"t.yaml:nodes.node.components: has no component of kind gpu",
    ),
    "nodes apart": (
        lambda d: (d["nodes"]["node"].update(replicate=2), d.pop("fabric")),
        r"t.yaml:fabric.links: no route leads from gpu0 to gpu0 of another node",
    ),
    "name clash": (
        lambda d: d["fabric"].update(shared={"nic": {"kind": "switch"}}),
        r"t.yaml:fabric: 'nic0' names a component both of a node and of the fabric",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_name_their_place(mistake):
    change, message = MISTAKES[mistake]
    with pytest.raises(InputError, match=message):
        LinkGraph(parse_topology(spoil(change), "t.yaml"))


def test_an_unknown_name_or_component_offers_the_nearest():
    with pytest.raises(InputError, match=r"cluster.topology: there is no topology named 'dgx-h10' .*dgx-h100"):
        load_topology("dgx-h10")
    with pytest.raises(InputError, match=r"no component 'gpu11'"):
        build("dgx-h100").route("gpu0", "gpu11")
    with pytest.raises(InputError, match=r"at least one node"):
        load_topology("dgx-h100", nodes=0)
