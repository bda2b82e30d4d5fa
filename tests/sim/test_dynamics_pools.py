"""Faults in fleets with pools: prompts that wait to be handed over, copies under way and decodes, all lost and none forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from changing_fleets import COLD_S, feed, injector_of
from drivers import Case, Linear, random_arrivals, request

from serving.errors import InputError
from serving.metrics import COMPLETED, ERROR, Metrics
from serving.policies import load
from serving.request import Arrival
from serving.scenario.dynamics import Fault, Faults
from serving.topology import load_topology
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.dynamics import Fleet
from sim.environment import Environment
from sim.network import Network
from sim.replica import Replica
from sim.topology import LinkGraph

FLAT = Linear(0.1, 0.0, 0.0, 0.0)


def build_pools(case: Case, *, bytes_per_token: float = 1e6, stepwise: bool = False) -> tuple[Disaggregated, Metrics]:
    """Two prefill and two decode replicas, one GPU each, in one node."""
    env = Environment()
    metrics = Metrics(["default", "p0", "p1"], lambda name: (np.inf,) * 3, keep_rows=True)

    def pool(first: int) -> Cluster:
        replicas = [Replica(i, case.scheduler(), case.latency, metrics, label=first + i, stepwise=stepwise) for i in range(2)]
        return Cluster(env, replicas, load("routing", "least_outstanding_tokens", {}), stepwise=stepwise)

    graph = LinkGraph(load_topology("dgx-h200"))
    fleet = Disaggregated(pool(0), pool(2), Network(graph, env), lambda replica: [graph.gpus[replica.label]], bytes_per_token)
    fleet.know_routes()
    return fleet, metrics


def serve_pools(case: Case, arrivals: list[Arrival], faults: Faults, seed: int = 0, **options: object) -> tuple[Fleet, dict, Metrics]:
    """Serve to the end; the fleet, the rows by column, the metrics."""
    cluster, metrics = build_pools(case, **options)
    fleet = Fleet(cluster, 4, lambda index: COLD_S, lambda index: case.scheduler())
    told: list[int] = []
    cluster.on_outcome(lambda request_id, time_s, status: told.append(request_id))
    injector_of(fleet, metrics, faults, seed, cluster.network)
    feed(cluster.env, cluster, arrivals)
    cluster.env.run()
    for replica in cluster.replicas:
        replica.scheduler.check()
        assert not replica.scheduler.live()
    assert not cluster.in_flight and not cluster._crossing
    cluster.network.check()
    columns = metrics.columns()
    assert sorted(told) == columns["request_id"].tolist() == [arrival.request.request_id for arrival in arrivals]
    for pool in (cluster.prefill, cluster.decode):
        pool.signals.read(pool.replicas)
        assert list(pool.signals.outstanding_tokens) == [0, 0], "what routers count as outstanding has left"
    return fleet, columns, metrics


def random_pool_faults(seed: int) -> Faults:
    rng = np.random.default_rng([9, seed])
    events = []
    for _ in range(int(rng.integers(1, 5))):
        kind = ("replica_loss", "replica_loss", "slow_link", "host_stall", "slow_gpu")[int(rng.integers(5))]
        when = {"at_s": float(rng.choice([0.2, 0.7, 1.5]))} if rng.random() < 0.6 else {"every_s": float(rng.choice([0.5, 1.5]))}
        own = {"factor": 0.01, "link": ""} if kind == "slow_link" else {"replica": int(rng.integers(4)) if rng.random() < 0.6 else None}
        events.append(
            Fault(kind=kind, **when, for_s=float(rng.choice([0.05, 0.4])), **own, **({"factor": 3.0} if kind == "slow_gpu" else {}))
        )
    return Faults(events=tuple(events), lost_requests="retry" if rng.random() < 0.8 else "fail", retries=int(rng.integers(0, 4)))


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_conserve_requests_and_pages(seed):
    case = Case(blocks=40, block_tokens=16, max_batch_seqs=6, policies={"admission": ("always", {})} if seed % 5 == 0 else {})
    arrivals = random_arrivals(seed, case, requests=50)
    fleet, columns, _ = serve_pools(case, arrivals, random_pool_faults(seed), seed, bytes_per_token=float(10 ** (5 + seed % 4)))
    status = columns["status_code"]
    assert int((status == ERROR).sum()) == fleet.ledger.failed
    assert columns["arrival_s"].tolist() == [arrival.request.arrival_s for arrival in arrivals]
    for arrival, tokens, code in zip(arrivals, columns["output_tokens"].tolist(), status.tolist()):
        if code == COMPLETED:
            assert tokens == min(arrival.output_tokens, arrival.request.max_output_tokens)


@pytest.mark.parametrize("seed", range(40, 50))
def test_fast_equals_stepwise(seed):
    case = Case(blocks=40, block_tokens=16, max_batch_seqs=6)
    arrivals = random_arrivals(seed, case, requests=40)
    fast, slow = (serve_pools(case, arrivals, random_pool_faults(seed), seed, stepwise=stepwise) for stepwise in (False, True))
    assert fast[0].ledger == slow[0].ledger
    for name, column in fast[1].items():
        assert np.array_equal(column, slow[1][name], equal_nan=name.endswith("_s")), name
    assert fast[2].itl_gaps._bins.tolist() == slow[2].itl_gaps._bins.tolist()
    for left, right in zip(fast[0].cluster.replicas, slow[0].cluster.replicas):
        assert (left.pages.block_seconds, left.idle_s, left.steps) == (right.pages.block_seconds, right.idle_s, right.steps)


def losing(at_s: float, replica: int, for_s: float = 1.0) -> Faults:
    return Faults(events=(Fault(kind="replica_loss", at_s=at_s, for_s=for_s, replica=replica),))


def test_a_copy_under_way_to_a_lost_decode_replica_goes_elsewhere_and_nothing_is_computed_again():
    """The prompt is done at 1.1 and its copy takes seconds; the pages are still where they were computed."""
    arrivals = [Arrival(request(0, 1.0, 64), 5)]
    calm, columns, _ = serve_pools(Case(latency=FLAT), arrivals, losing(60.0, 3), bytes_per_token=1e10)
    copy_s = columns["finish_s"][0] - 1.1 - 0.4
    assert copy_s > 1.0
    fleet, columns, _metrics = serve_pools(Case(latency=FLAT), arrivals, losing(1.6, 2, for_s=30.0), bytes_per_token=1e10)
    assert columns["first_token_s"][0] == pytest.approx(1.1) and columns["replica"][0] == 3
    assert columns["finish_s"][0] == pytest.approx(1.6 + copy_s + 0.4)
    assert fleet.ledger.retried == 0
    assert fleet.cluster.transfers == 2
    assert fleet.cluster.transferred_bytes == pytest.approx(64e10 * (1 + 0.5 / copy_s), rel=1e-3)
    assert calm.cluster.transferred_bytes == pytest.approx(64e10)


def test_a_lost_prefill_replica_takes_its_copies_with_it_and_a_lost_decode_replica_its_answers():
    arrivals = [Arrival(request(0, 1.0, 64), 5)]
    fleet, columns, _ = serve_pools(Case(latency=FLAT), arrivals, losing(1.6, 0, for_s=30.0), bytes_per_token=1e10)
    assert fleet.ledger.retried == 1
    assert columns["first_token_s"][0] == pytest.approx(1.7), "the prompt begins again at once, on the other replica"
    fleet, columns, _ = serve_pools(Case(latency=FLAT), arrivals, losing(1.25, 2, for_s=30.0), bytes_per_token=1.0)
    assert fleet.ledger.retried == 1
    assert columns["first_token_s"][0] == pytest.approx(1.35) and columns["replica"][0] == 3
    assert columns["output_tokens"][0] == 5


def test_hand_overs_wait_while_no_decode_replica_is_there():
    events = tuple(Fault(kind="replica_loss", at_s=0.5, for_s=2.0, replica=index) for index in (2, 3))
    fleet, columns, _ = serve_pools(Case(latency=FLAT), [Arrival(request(0, 1.0, 64), 5)], Faults(events=events), bytes_per_token=1.0)
    assert columns["first_token_s"][0] == pytest.approx(1.1) and columns["finish_s"][0] == pytest.approx(2.5 + COLD_S + 0.4, abs=1e-4)
    assert fleet.ledger.retried == 0


def test_a_slow_link_moves_at_its_factor_for_its_time():
    arrivals = [Arrival(request(0, 1.0, 64), 5)]

    def finish_s(*events: Fault) -> float:
        faults = Faults(events=events or (Fault(kind="host_stall", at_s=60.0, for_s=1.0, replica=0),))
        return float(serve_pools(Case(latency=FLAT), arrivals, faults, bytes_per_token=1e10)[1]["finish_s"][0])

    copy_s = finish_s() - 1.1 - 0.4
    whole = Fault(kind="slow_link", at_s=0.5, for_s=100.0, factor=0.5, link="")
    assert finish_s(whole) - 1.5 == pytest.approx(2 * copy_s, rel=1e-3)
    second = Fault(kind="slow_link", at_s=1.3, for_s=1.0, factor=0.25, link="")
    assert finish_s(second) - 1.5 == pytest.approx(copy_s + 0.75, rel=1e-3), "a quarter of the rate for a second"
    worst = Fault(kind="slow_link", at_s=1.3, for_s=1.0, factor=0.5, link="")
    assert finish_s(second, worst) == pytest.approx(finish_s(second)), "of overlapping faults the worst counts"


def test_a_link_must_exist():
    cluster, _ = build_pools(Case())
    with pytest.raises(InputError, match="no link that is crossed is named 'nvlnk'"):
        cluster.network.check_link("nvlnk", "faults.events[0].link")


def test_refused_prompts_do_not_make_a_replica_look_idle():
    """What the decode pool can never hold is refused in the name of some prefill replica, whose books stay even."""
    cluster, metrics = build_pools(Case(blocks=9, block_tokens=16))
    feed(cluster.env, cluster, [Arrival(request(i, 1.0, 10_000), 3) for i in range(4)])
    cluster.env.run()
    cluster.prefill.signals.read(cluster.prefill.replicas)
    assert list(cluster.prefill.signals.outstanding_tokens) == [0, 0]
    assert cluster.arrived == 4 and not cluster._output_tokens
    assert metrics.columns()["status_code"].tolist() == [1] * 4
