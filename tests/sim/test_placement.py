"""Replicas on the GPUs of a topology: who gets which, what the links between them are worth, and what is refused."""

from __future__ import annotations

import pytest

from hwmodels import collectives
from serving.catalog import load_gpu
from serving.errors import InputError
from serving.layout import Layout
from serving.metrics import Metrics
from serving.plan import StepShape
from serving.scenario import from_mapping
from sim.fleet import build_fleet, resolve, resolve_fleet
from sim.placement import Wanted, links_of, place, shared_rate
from sim.topology import build

H100 = load_gpu("h100-sxm")


def scenario(**cluster):
    workload = {"requests": 20, "arrivals": {"process": "poisson", "rate_rps": 5.0}, "prompt_tokens": 64, "output_tokens": 8}
    policy = cluster.pop("policy", {})
    llm = cluster.pop("llm", "llama-3.1-8b")
    given = {"gpu": "h100-sxm", **cluster}
    return from_mapping({"version": 1, "name": "x", "llm": llm, "max_model_len": 4096, "cluster": given, "policy": policy, "workload": workload})


def test_groups_stay_inside_a_node_and_leave_over_what_is_too_small():
    graph = build("two-node-rdma")
    placed = place(graph, [Wanted(Layout(tensor_parallel=3), H100, 4)])[0]
    assert placed[1] == ["node0.gpu3", "node0.gpu4", "node0.gpu5"]
    assert placed[2] == ["node1.gpu0", "node1.gpu1", "node1.gpu2"]
    with pytest.raises(InputError, match=r"cluster\.replicas: 5 replicas of 3 GPUs need 15 GPUs; the topology has 16"):
        place(graph, [Wanted(Layout(tensor_parallel=3), H100, 5)])


def test_two_kinds_share_one_topology_without_sharing_gpus():
    first, second = place(build("two-node-rdma"), [Wanted(Layout(), H100, 3), Wanted(Layout(tensor_parallel=4), H100, 2)])
    used = [gpu for gpus in (*first, *second) for gpu in gpus]
    assert len(used) == len(set(used)) == 11
    assert [gpus[0] for gpus in second] == ["node0.gpu3", "node1.gpu0"]


@pytest.mark.parametrize(
    ("cluster", "path", "problem"),
    [
        ({"tensor_parallel": 16, "topology": "two-node-rdma"}, "cluster.tensor_parallel", "in different nodes"),
        ({"gpu": "rtx-4090", "tensor_parallel": 2, "topology": "rtx4090-box"}, "cluster.tensor_parallel", "no direct link"),
        ({"gpu": "a100-sxm-80gb", "topology": "dgx-h100"}, "cluster.gpu", "has no a100-sxm-80gb"),
        ({"replicas": 9, "topology": "dgx-h100"}, "cluster.replicas", "need 9 GPUs; the topology has 8"),
        ({"pipeline_parallel": 33}, "cluster.pipeline_parallel", "33 stages cannot share 32 layers"),
        ({"expert_parallel": 2}, "cluster.expert_parallel", "has no experts"),
        ({"llm": "mixtral-8x7b", "tensor_parallel": 3}, "cluster.tensor_parallel", "does not divide"),
        ({"llm": "mixtral-8x7b", "expert_parallel": 3}, "cluster.expert_parallel", "8 experts"),
        ({"llm": "mixtral-8x7b", "tensor_parallel": 4, "expert_parallel": 2}, "cluster.expert_parallel", "no multiple of tensor_parallel"),
        ({"llm": "mixtral-8x7b", "tensor_parallel": 4, "expert_parallel": 4, "sequence_parallel": 2}, "cluster.expert_parallel", "combined"),
        ({"llm": "mixtral-8x7b", "tensor_parallel": 4, "expert_parallel": 4, "experts": {"load": [1.0, 2.0]}}, "cluster.experts.load", "names 2"),
        ({"ingress": {"at": ["dram7"]}, "topology": "dgx-h100"}, "cluster.ingress.at", "no component 'dram7'"),
        ({"replicas": 4, "tenancy": {"tenants": 4}}, "kv_cache.memory_fraction", "4 tenants cannot each have 0.9"),
        ({"policy": {"sharding": "heads"}}, "policy.sharding", "no sharding policy 'heads'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_path(cluster, path, problem):
    with pytest.raises(InputError) as refused:
        asked = scenario(**cluster)
        build_fleet(asked, resolve_fleet(asked), Metrics(["default"], asked.slo.targets))
    assert path in refused.value.where and problem in refused.value.problem


@pytest.mark.parametrize("cluster", [{"ingress": {}}, {"replicas": 3, "tenancy": {"tenants": 2}}, {"nodes": 2}, {"experts": {"zipf": 1.0, "load": [1.0]}}])
def test_keys_that_do_not_go_together_are_refused(cluster):
    with pytest.raises(InputError, match="cluster"):
        scenario(**cluster)


def test_a_group_on_its_own_links_pays_what_was_measured_and_another_what_its_routes_give():
    graph = build("two-node-rdma")
    inside = links_of(graph, ["node0.gpu0", "node0.gpu1"], Layout(tensor_parallel=2), H100)
    assert inside.all_reduce_s(16384) == collectives.load("h100-sxm").allreduce_s(16384, 2)
    server = build("pcie-8gpu")
    pcie = links_of(server, ["gpu0", "gpu1", "gpu2", "gpu3"], Layout(tensor_parallel=4), load_gpu("a100-pcie-80gb"))
    assert pcie.all_reduce_s(1 << 24) > 3 * (1 << 24) / 2 / 32e9  # 2 (n-1)/n of the vector at PCIe 4.0 x16 at best


def test_stages_in_two_nodes_send_over_the_network_and_those_in_one_over_nvlink():
    graph = build("two-node-rdma")
    near = links_of(graph, ["node0.gpu0", "node0.gpu1"], Layout(stages=2), H100).hop
    far = links_of(graph, [f"node{n}.gpu{i}" for n in range(2) for i in range(8)], Layout(tensor_parallel=8, stages=2), H100).hop
    assert near.bytes_per_s == pytest.approx(380e9, rel=0.01)
    assert far.bytes_per_s <= 50e9 and far.latency_s > near.latency_s


def test_partners_that_share_a_channel_share_its_rate():
    graph = build("pcie-8gpu")
    alone = shared_rate(graph, [("gpu0", "gpu4")])
    together = shared_rate(graph, [(f"gpu{i}", f"gpu{i + 4}") for i in range(4)])
    assert together.bytes_per_s == pytest.approx(alone.bytes_per_s / 4, rel=0.05)


def test_replicas_with_slower_links_are_priced_apart():
    parts = resolve(scenario(llm="llama-3.1-70b", tensor_parallel=1, pipeline_parallel=6, replicas=2, topology="two-node-rdma"))
    assert [{gpu[:5] for gpu in gpus} for gpus in parts.placed] == [{"node0"}, {"node0", "node1"}]
    one, other = parts.latencies
    shape = StepShape((), 1, 500, 1)
    assert other.step_s(shape) > one.step_s(shape)
    assert parts.gpus == 12
