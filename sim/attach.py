"""Attaches what a scenario says of a changing fleet (autoscaling, faults) to a cluster, and reports what came of it."""

from __future__ import annotations

import math
from typing import Any

from serving.errors import InputError
from serving.metrics import ERROR, Metrics
from serving.policies import load
from serving.request import Request
from serving.rng import stream
from serving.scenario import Scenario
from serving.scenario.dynamics import ColdStart
from sim.autoscaler import Autoscaler, State
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.dynamics import Fleet
from sim.faults import FaultInjector, recovery_s
from sim.fleet import Parts, new_scheduler
from sim.network import Network


def cold_start_stages(parts: Parts, spec: ColdStart) -> dict[str, float]:
    """Seconds of each stage of a cold start; weights cross the GPU's host link, as fast as that gets, unless the scenario gives a rate."""
    cluster = parts.scenario.cluster
    weight_dtype = None if cluster.weight_dtype == "auto" else cluster.weight_dtype
    weight_bytes = parts.layout.weight_bytes(parts.llm, weight_dtype)
    rate = spec.weights_bytes_per_s or parts.gpu.pcie.bytes_per_s * parts.gpu.pcie.efficiency
    stages = {"schedule": spec.schedule_s, "weights": weight_bytes / rate, "compile": spec.compile_s}
    return {**stages, "graph_capture": spec.graph_capture_s, "warmup": spec.warmup_s}


class Dynamics:
    """Autoscaling and faults of one run; ``report`` gives the ``fleet`` part of its summary."""

    def __init__(self, cluster: Cluster | Disaggregated, scenario: Scenario, parts: dict[str, Parts], metrics: Metrics) -> None:
        scaling, faults = scenario.cluster.autoscaling, scenario.faults
        self._metrics, self._scenario = metrics, scenario
        pools = {pool.role: pool.autoscaling for pool in scenario.cluster.pools}
        given = {role: pools.get(role) or scaling for role in parts}
        self.stages = {
            role: cold_start_stages(part, (faults and faults.cold_start) or (given[role] and given[role].cold_start) or ColdStart())
            for role, part in parts.items()
        }
        roles = _roles(cluster, parts)
        ready = _ready(cluster, scenario)
        self.ready = len(ready)  # at the start
        self.fleet = Fleet(
            cluster, ready, lambda index: sum(self.stages[roles[index]].values()), lambda index: new_scheduler(parts[roles[index]])
        )  # fmt: skip
        self._faults: FaultInjector | None = None
        if scaling is not None:
            policy = load("autoscaling", scaling.policy.name, scaling.policy.options, where=scaling.policy.where)
            Autoscaler(self.fleet, scaling, policy, State(self.fleet, scenario.slo.targets))
        for index, pool in enumerate(scenario.cluster.pools):
            if pool.autoscaling is not None:
                spec = pool.autoscaling.policy
                policy = load("autoscaling", spec.name, spec.options, where=f"cluster.pools[{index}].autoscaling.policy")
                Autoscaler(self.fleet, pool.autoscaling, policy, State(self.fleet, scenario.slo.targets, pool.role))
        if faults is not None:
            network = _links(cluster)
            _check_faults(scenario, len(roles), network)
            self._faults = FaultInjector(self.fleet, faults, stream(scenario.seed, "faults"), network, self._fail)

    def _fail(self, request: Request, now_s: float) -> None:
        nan = math.nan
        index = self._metrics.class_index(request.class_name)
        self._metrics.finish((request.request_id, index, request.arrival_s, request.prompt_tokens, 0, 0, nan, nan, now_s, 0, -1, ERROR))

    def provisioned_s(self, end_s: float, role: str | None = None) -> float:
        """Seconds for which replicas were paid, until ``end_s``; those of the pool ``role``, or all."""
        among = self.fleet.cluster.positions(role) if isinstance(self.fleet.cluster, Disaggregated) and role is not None else None
        return self.fleet.provisioned_s(end_s, among)

    def report(self, end_s: float) -> dict[str, Any]:
        """The ``fleet`` part of summary.json; ask after the metrics' summary."""
        ledger = self.fleet.ledger
        report: dict[str, Any] = {
            "provisioned_replica_s": self.provisioned_s(end_s),
            "cold_start_s": self.stages if len(self.stages) > 1 else next(iter(self.stages.values())),
            "changes": [{"at_s": at_s, "replica": index, "state": state} for at_s, index, state in ledger.changes if at_s <= end_s],
        }
        if len(self.stages) > 1:
            report["provisioned_by_pool_s"] = {role: self.provisioned_s(end_s, role) for role in self.stages}
        if self._faults is not None:
            faults, struck = self._scenario.faults, [strike for strike in self._faults.struck if strike.at_s <= end_s]
            wanted = faults.recovered if faults.recovered is not None else self._scenario.slo.attainment
            recovered = recovery_s([strike.at_s for strike in struck], self._metrics.timeline(), wanted, faults.window_s)
            report["retried"], report["failed"] = ledger.retried, ledger.failed
            report["faults"] = [
                {"at_s": at_s, "kind": fault.kind, **({"link": fault.link} if index < 0 else {"replica": index}), "recovery_s": seconds}
                for (at_s, fault, index), seconds in zip(struck, recovered)
            ]
        return report


def _roles(cluster: Cluster | Disaggregated, parts: dict[str, Parts]) -> list[str]:
    """The kind of each replica, by its position in the fleet."""
    if isinstance(cluster, Disaggregated):
        return ["prefill"] * len(cluster.prefill.replicas) + ["decode"] * len(cluster.decode.replicas)
    return list(parts) * len(cluster.replicas)


def _ready(cluster: Cluster | Disaggregated, scenario: Scenario) -> list[int]:
    """Positions of the replicas that serve at the start."""
    if isinstance(cluster, Disaggregated):
        return [position for pool in scenario.cluster.pools for position in cluster.positions(pool.role)[: pool.replicas]]
    return list(range(scenario.cluster.replicas if scenario.cluster.autoscaling is not None else len(cluster.replicas)))


def _links(cluster: Cluster | Disaggregated) -> Network | None:
    """The links that something crosses in this fleet, if any."""
    if isinstance(cluster, Disaggregated):
        return cluster.network
    return cluster.signals.delivery.network if cluster.signals.delivery is not None else None


def _check_faults(scenario: Scenario, replicas: int, network: Network | None) -> None:
    for index, fault in enumerate(scenario.faults.events):
        where = f"faults.events[{index}]"
        if fault.kind == "slow_link":
            if network is None:
                raise InputError(
                    where, "nothing crosses a link in this fleet: only one with pools or an ingress has links that could be slow"
                )
            network.check_link(fault.link, f"{where}.link")
        if fault.replica is not None and fault.replica >= replicas:
            raise InputError(f"{where}.replica", f"there is no replica {fault.replica}", f"the fleet has {replicas}, from 0")


def attach(cluster: Cluster | Disaggregated, scenario: Scenario, parts: dict[str, Parts], metrics: Metrics) -> Dynamics | None:
    """Attach what the scenario asks for; None when its fleet stays as it is. Raises InputError for what cannot be."""
    pooled = any(pool.autoscaling is not None for pool in scenario.cluster.pools)
    if scenario.cluster.autoscaling is None and scenario.faults is None and not pooled:
        return None
    if isinstance(cluster, Disaggregated):
        cluster.know_routes()
    return Dynamics(cluster, scenario, parts, metrics)
