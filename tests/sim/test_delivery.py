"""Requests that cross links to their replica, and replicas that share a GPU."""

from __future__ import annotations

import pytest
from drivers import request

from serving.policies import load as load_policy
from serving.scenario import from_mapping
from serving.scenario.parallel import Tenancy
from sim.cluster import FleetSignals
from sim.fleet import build_fleet, new_metrics, resolve_fleet
from sim.run import simulate
from sim.tenancy import switch_s


def scenario(routing="topology_aware", rate=50.0, requests=400, kv_cache=None, **cluster):
    workload = {"requests": requests, "arrivals": {"process": "poisson", "rate_rps": rate}, "prompt_tokens": {"dist": "uniform", "min": 16, "max": 600},
                "output_tokens": {"dist": "uniform", "min": 2, "max": 40}}  # fmt: skip
    given = {"gpu": "h100-sxm", "replicas": 4, **cluster}
    return from_mapping({"version": 1, "name": "x", "llm": "qwen2.5-0.5b", "max_model_len": 4096, "cluster": given, "kv_cache": kv_cache or {},
                         "policy": {"routing": routing}, "workload": workload})  # fmt: skip


CROSSING = {"topology": "dgx-h100", "ingress": {"at": ["dram0"], "bytes_per_token": 1e6}}


def build(asked):
    parts = resolve_fleet(asked)
    return build_fleet(asked, parts, new_metrics(asked))


# -- delivery -----------------------------------------------------------------------------------------------------------


def test_a_request_reaches_its_replica_when_its_tokens_have_crossed_the_links():
    cluster = build(scenario(**CROSSING))
    delivery = cluster.signals.delivery
    seen = []
    deliver = cluster.delivered
    cluster.delivered = lambda *what: (seen.append(cluster.env.now), deliver(*what))
    cluster.submit(request(1, 0.0, 1000), 5)
    assert cluster.in_flight == 1 and len(delivery) == 1
    cluster.env.run()
    cluster.drain()
    assert seen == [pytest.approx(1e9 / 52.8e9, rel=0.01)]  # a gigabyte over one PCIe 5.0 port
    assert cluster.in_flight == 0 and not any(delivery._pending_bytes.values())
    assert delivery.report()["throughput_swing"] == 0.0


def test_the_far_socket_is_farther_and_a_busy_link_costs_more():
    cluster = build(scenario(replicas=8, **CROSSING))
    delivery = cluster.signals.delivery
    one = request(1, 0.0, 1000)
    delivery.enter(one)
    distances = [cluster.signals.distance_s(replica) for replica in range(8)]
    assert distances[0] < distances[7]
    before = cluster.signals.delivery_s(0)
    delivery.start(request(2, 0.0, 5000), 3, 1)  # to the neighbour under the same switch
    delivery.enter(one)
    assert cluster.signals.delivery_s(0) > before
    assert before == pytest.approx(distances[0] + 1e9 / (0.8 * 52.8e9), rel=0.01)


def test_an_abandoned_request_frees_its_links_and_is_recorded_as_aborted():
    cluster = build(scenario(**CROSSING))
    told = []
    cluster.on_outcome(lambda request_id, time_s, status: told.append((request_id, status)))
    replica = cluster.submit(request(1, 0.0, 3000), 5)
    assert cluster.abort(1, replica)
    assert told == [(1, "aborted")] and not cluster.in_flight and not any(cluster.signals.delivery._pending_bytes.values())
    cluster.env.run()


def test_a_replica_that_went_away_meanwhile_does_not_get_the_request():
    cluster = build(scenario(**CROSSING))
    first = cluster.submit(request(1, 0.0, 1000), 5)
    cluster.set_online(first, False)
    cluster.env.run()
    cluster.drain()
    assert cluster.in_flight == 0
    assert cluster.replicas[first].steps == 0 and sum(replica.steps for replica in cluster.replicas) == 5


@pytest.mark.parametrize("routing", ["random", "round_robin", "topology_aware", "least_outstanding_tokens", "prefix_affinity"])
def test_fast_equals_stepwise_across_links(routing):
    asked = scenario(routing, **CROSSING)
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0}
    assert fast["requests"]["completed"] == 400
    assert fast["ttft_s"]["mean"] > fast["ingress"]["delivery_s"]["mean"]


def test_routing_by_topology_delivers_sooner_than_by_chance():
    busy = {"rate": 150.0, "replicas": 8, "topology": "dgx-h100", "ingress": {"bytes_per_token": 1e6}}
    near, chance = (simulate(scenario(routing, **busy)).summary["ingress"]["delivery_s"] for routing in ("topology_aware", "random"))
    assert near["mean"] < chance["mean"] and near["p99"] < chance["p99"]


def test_routing_by_topology_without_one_is_routing_by_load():
    signals = FleetSignals(3)
    signals.outstanding_tokens = [30, 10, 20]
    assert load_policy("routing", "topology_aware").route(request(1), signals) == 1
    assert {load_policy("routing", "random", {"seed": seed}).route(request(1), signals) for seed in range(20)} == {0, 1, 2}


# -- tenancy ------------------------------------------------------------------------------------------------------------


SHARED = {"kv_cache": {"memory_fraction": 0.2}, "routing": "round_robin", "rate": 20.0}


def test_a_switch_of_context_by_hand():
    spec = Tenancy(tenants=4, alpha_s=1e-6, beta_s=8e-6, gamma_s=10e-6, epsilon_s=2e-6)
    assert switch_s(spec, 1, 0.2) == pytest.approx(3e-6)
    assert switch_s(spec, 4, 0.2) == pytest.approx(4e-6 + 6e-6 + 6e-6 + 2e-6)
    assert switch_s(spec.model_copy(update={"context_cache": True, "cached": 0.5}), 4, 0.2) == pytest.approx(8e-6 + 2e-6)


@pytest.mark.parametrize("share", ["time", "partition"])
def test_fast_equals_stepwise_on_a_shared_gpu(share):
    asked = scenario(**SHARED, tenancy={"tenants": 2, "share": share, "alpha_s": 1e-4})
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0}
    assert fast["requests"]["completed"] == 400


def test_a_tenant_alone_runs_at_full_speed_and_neighbours_slow_it_down():
    alone = simulate(scenario(**SHARED, replicas=1)).summary["itl_s"]
    # Few requests: hardly ever two at once. Many: all tenants are in service most of the time.
    quiet = simulate(scenario(**{**SHARED, "rate": 0.5}, requests=100, tenancy={"tenants": 4})).summary["itl_s"]
    crowded = simulate(scenario(**{**SHARED, "rate": 400.0}, tenancy={"tenants": 4})).summary["itl_s"]
    assert quiet["p50"] == pytest.approx(alone["p50"], rel=0.05)
    assert crowded["p50"] > 3 * alone["p50"]


def test_a_partition_is_steady_and_time_sharing_quick_when_few_are_there():
    light = {**SHARED, "rate": 15.0}
    shared, parted = (simulate(scenario(**light, requests=1000, tenancy={"tenants": 4, "share": share})).summary["itl_s"] for share in ("time", "partition"))
    assert shared["mean"] < parted["mean"]
    assert parted["p99"] / parted["mean"] < shared["p99"] / shared["mean"]


def test_gpus_are_paid_once_however_many_share_them():
    parts = resolve_fleet(scenario(**SHARED, tenancy={"tenants": 4}))["replicas"]
    assert parts.gpus == 1
