"""Prefill and decode pools that scale apart: each by its own policy, and a drained replica is off with the last page that it held."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from changing_fleets import COLD_S, feed
from drivers import Case, random_arrivals, request
from test_dynamics_pools import FLAT, build_pools

from serving.errors import InputError
from serving.request import Arrival
from serving.scenario import from_mapping
from serving.scenario.dynamics import Autoscaling
from serving.scenario.model import Targets
from sim.autoscaler import Autoscaler, State
from sim.dynamics import DRAINING, OFF, READY, Fleet
from sim.run import simulate
from validate.explain import attribute
from validate.run_data import read_run


@dataclass
class Steps:
    """Asks for what was written down, then for the last of it; keeps what it saw."""

    wanted: list[int]
    seen: list[tuple[int, int]] = field(default_factory=list)

    def target(self, fleet: State) -> int:
        self.seen.append((fleet.pending, fleet.violations(60.0)))
        return self.wanted.pop(0) if len(self.wanted) > 1 else self.wanted[0]


def scaled(case: Case, arrivals: list[Arrival], prefill: list[int], decode: list[int], ready=(0, 1, 2, 3), **options):
    """Two and two replicas, asked for every half second; (fleet, rows, policies)."""
    cluster, metrics = build_pools(case, **options)
    fleet = Fleet(cluster, ready, lambda index: COLD_S, lambda index: case.scheduler())
    policies = {}
    for role, wanted in (("prefill", prefill), ("decode", decode)):
        policies[role] = Steps(list(wanted))
        spec = Autoscaling(minimum=1, maximum=2, interval_s=0.5)
        Autoscaler(fleet, spec, policies[role], State(fleet, lambda name: Targets(ttft_s=0.3, tpot_s=0.05), role))
    feed(cluster.env, cluster, arrivals)
    cluster.env.run()
    for replica in cluster.replicas:
        replica.scheduler.check()
        assert not replica.scheduler.live() and not replica.scheduler.landing.parked
    assert not cluster.in_flight
    columns = metrics.columns()
    assert columns["request_id"].tolist() == [arrival.request.request_id for arrival in arrivals]
    return fleet, columns, policies


def test_each_pool_follows_its_own_policy():
    fleet, _, _ = scaled(Case(latency=FLAT), [Arrival(request(i, i / 2, 64), 5) for i in range(10)], [2, 1, 2], [1, 2, 1])
    changes = [(at_s, index, state) for at_s, index, state in fleet.ledger.changes]
    assert {index for _, index, _ in changes} == {1, 3}, "the second of each pool; the first of each stays"
    # Asked at 0.5, 1.0 and 1.5 s: prefill 2, 1, 2 and decode 1, 2, 1.
    states = {pool: [state for _, index, state in changes if index == pool] for pool in (1, 3)}
    assert states[1][0] == DRAINING and states[1][-1] == READY
    assert states[3][0] == DRAINING and states[3][-1] in (DRAINING, OFF)
    assert fleet.provisioned_s(1.0, range(2)) + fleet.provisioned_s(1.0, range(2, 4)) == pytest.approx(fleet.provisioned_s(1.0))


def test_a_prefill_replica_is_off_only_when_its_pages_have_been_copied():
    """One replica of each kind for a prompt whose copy takes seconds; the prefill replica drains meanwhile."""
    arrivals = [Arrival(request(0, 0.0, 64), 5), Arrival(request(1, 0.0, 64), 5)]
    fleet, columns, _ = scaled(Case(latency=FLAT), arrivals, [1], [2], bytes_per_token=1e10)
    off_s = next(at_s for at_s, index, state in fleet.ledger.changes if (index, state) == (1, OFF))
    drained_s = next(at_s for at_s, index, state in fleet.ledger.changes if (index, state) == (1, DRAINING))
    assert drained_s == 0.5 and off_s > 1.0
    assert columns["finish_s"].max() == pytest.approx(off_s + 4 * 0.1, abs=0.3), "the last copy ends, then four more tokens"


def test_a_decode_replica_waits_for_what_is_on_its_way_to_it():
    arrivals = [Arrival(request(i, 0.0, 64), 5) for i in range(2)]
    fleet, _, _ = scaled(Case(latency=FLAT), arrivals, [2], [1], bytes_per_token=1e10)
    changes = [(at_s, state) for at_s, index, state in fleet.ledger.changes if index == 3]
    assert [state for _, state in changes] == [DRAINING, OFF] and changes[1][0] > 1.0


def test_each_pool_answers_for_its_own_objectives_and_sees_its_own_queue():
    """Steps of 0.1 s miss 0.05 s a token; a first token within 0.3 s misses nothing, one behind a queue does."""
    calm = [Arrival(request(0, 0.0, 64), 9), Arrival(request(1, 2.0, 64), 9)]
    _, _, policies = scaled(Case(latency=FLAT), calm, [2], [2])
    assert policies["prefill"].seen[-1][1] == 0 and policies["decode"].seen[-1][1] == 1
    crowd = [Arrival(request(i, 0.0, 64), 1) for i in range(40)]
    _, _, policies = scaled(Case(latency=FLAT, max_batch_seqs=2), crowd, [2], [2])
    assert policies["prefill"].seen[0][0] > 5 and policies["decode"].seen[0][0] == 0
    assert policies["prefill"].seen[-1][1] > 5 and policies["decode"].seen[-1][1] == 0


@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_lost_while_pools_breathe_and_fast_equals_stepwise(seed):
    case = Case(blocks=40, block_tokens=16, max_batch_seqs=6)
    arrivals = random_arrivals(seed, case, requests=40)
    wanted = [[1 + (seed + i * 3) % 2 for i in range(8)], [1 + (seed // 2 + i) % 2 for i in range(8)]]
    ready = [(0, 1, 2, 3), (0, 2), (1, 2, 3)][seed % 3]
    fast, slow = (scaled(case, arrivals, *wanted, ready=ready, stepwise=stepwise, bytes_per_token=float(10 ** (5 + seed % 4))) for stepwise in (False, True))
    assert fast[0].ledger == slow[0].ledger
    assert fast[1]["finish_s"].tolist() == slow[1]["finish_s"].tolist()


# -- from a scenario ----------------------------------------------------------------------------------------------------


def scenario(prefill=None, decode=None, **cluster):
    pools = [{"role": "prefill", "replicas": 1, **(prefill or {})}, {"role": "decode", "replicas": 1, **(decode or {})}]
    workload = {"arrivals": {"process": "piecewise", "pieces": [{"until_s": 20.0, "rate_rps": 5.0}, {"until_s": 50.0, "rate_rps": 60.0}, {"until_s": 80.0, "rate_rps": 5.0}]},
                "prompt_tokens": {"dist": "uniform", "min": 500, "max": 3000}, "output_tokens": {"dist": "uniform", "min": 20, "max": 120}}  # fmt: skip
    return from_mapping({"name": "x", "llm": "llama-3.1-8b", "max_model_len": 8192, "workload": workload, "slo": {"default": {"ttft_ms": 500}},
                         "cluster": {"gpu": "h200-sxm", "topology": "dgx-h200", "pools": pools, **cluster}})  # fmt: skip


SCALED = {"autoscaling": {"policy": {"name": "utilisation", "signal": "busy", "target": 0.5, "hold_s": 10.0}, "maximum": 3, "interval_s": 2.0,
                          "cold_start": {"schedule_s": 1.0, "compile_s": 0.0, "graph_capture_s": 0.0, "warmup_s": 0.0}}}  # fmt: skip


def test_a_pool_that_grows_serves_what_a_fixed_one_cannot(tmp_path):
    fixed, grown = simulate(scenario()).summary, simulate(scenario(prefill=SCALED), out=tmp_path / "run").summary
    assert grown["ttft_s"]["p99"] < fixed["ttft_s"]["p99"] / 2
    fleet = grown["fleet"]
    assert {row["replica"] for row in fleet["changes"]} <= {1, 2}, "prefill replicas are 0 to 2, the decode replica is 3"
    by_pool = fleet["provisioned_by_pool_s"]
    assert sum(by_pool.values()) == pytest.approx(fleet["provisioned_replica_s"]) and by_pool["decode"] == pytest.approx(grown["duration_s"])
    assert grown["duration_s"] < by_pool["prefill"] < 3 * grown["duration_s"]
    gpu_s = fleet["provisioned_replica_s"]
    assert grown["cost_usd"] / fixed["cost_usd"] == pytest.approx(gpu_s / (2 * fixed["duration_s"]), rel=1e-6)
    assert grown["load_factor"] is None and fixed["load_factor"] is not None
    data = read_run(tmp_path / "run")
    assert data.pools == {"prefill": range(3), "decode": range(3, 4)}
    found = attribute(data, "e2e_s")
    assert found.parts_s.sum(axis=1) == pytest.approx(found.whole_s, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"prefill": {"replicas": 5, **SCALED}}, "cluster.pools[0]"),
        ({"decode": {"autoscaling": {"maximum": 0}}}, "cluster.pools[1].autoscaling.maximum"),
        ({"decode": {"autoscaling": {"maximum": 2, "policy": "utilization"}}}, "cluster.pools[1].autoscaling.policy"),
        ({"decode": {"autoscaling": {"maximum": 9}}}, "cluster.pools"),
        ({"autoscaling": {"maximum": 2}}, "cluster"),
    ],
)
def test_a_mistake_names_its_place(changes, where):
    with pytest.raises(InputError) as caught:
        simulate(scenario(**changes))
    assert caught.value.where.endswith(where)


def test_a_plan_chooses_replicas_itself():
    asked = scenario(prefill=SCALED).resolved()
    with pytest.raises(InputError, match="pools that scale"):
        from_mapping({**asked, "plan": {"candidates": {"gpus": [{"name": "h200-sxm"}]}}})


def test_faults_alone_leave_the_load_factor_of_pools_as_it_is():
    stalled = scenario().model_copy(update={"faults": from_mapping({**scenario().resolved(), "faults": {"events": [{"kind": "host_stall", "at_s": 1.0, "for_s": 0.1}]}}).faults})
    assert simulate(stalled).summary["load_factor"] == pytest.approx(simulate(scenario()).summary["load_factor"], rel=0.02)
