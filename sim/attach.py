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
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.dynamics import Autoscaler, FaultInjector, Fleet, State, recovery_s
from sim.fleet import Parts, new_scheduler


def cold_start_stages(parts: Parts, spec: ColdStart) -> dict[str, float]:
    """Seconds of each stage of a cold start; weights cross the GPU's host link unless the scenario gives a rate."""
    cluster = parts.scenario.cluster
    weight_dtype = None if cluster.weight_dtype == "auto" else cluster.weight_dtype
    weight_bytes = parts.layout.weight_bytes(parts.llm, weight_dtype)
    rate = spec.weights_bytes_per_s or parts.gpu.pcie.bytes_per_s
    stages = {"schedule": spec.schedule_s, "weights": weight_bytes / rate, "compile": spec.compile_s}
    return {**stages, "graph_capture": spec.graph_capture_s, "warmup": spec.warmup_s}


class Dynamics:
    """Autoscaling and faults of one run; ``report`` gives the ``fleet`` part of its summary."""

    def __init__(self, cluster: Cluster, parts: Parts, metrics: Metrics) -> None:
        scenario = parts.scenario
        scaling = scenario.cluster.autoscaling
        self._metrics, self._scenario, self._cluster = metrics, scenario, cluster
        self.stages = cold_start_stages(parts, scaling.cold_start if scaling is not None else ColdStart())
        self.fleet = Fleet(cluster, scenario.cluster.replicas, sum(self.stages.values()), lambda: new_scheduler(parts))
        self._faults: FaultInjector | None = None
        if scaling is not None:
            policy = load("autoscaling", scaling.policy.name, scaling.policy.options, where=scaling.policy.where)
            Autoscaler(self.fleet, scaling, policy, State(self.fleet, scenario.slo.targets))
        if scenario.faults is not None:
            self._check_faults(scenario, len(cluster.replicas))
            self._faults = FaultInjector(self.fleet, scenario.faults, stream(scenario.seed, "faults"), None, self._fail)

    @staticmethod
    def _check_faults(scenario: Scenario, replicas: int) -> None:
        for index, fault in enumerate(scenario.faults.events):
            where = f"faults.events[{index}]"
            if fault.kind == "slow_link":
                raise InputError(where, "only a fleet with pools has links that could be slow")
            if fault.replica is not None and fault.replica >= replicas:
                raise InputError(f"{where}.replica", f"there is no replica {fault.replica}", f"the fleet has {replicas}, from 0")

    def _fail(self, request: Request, now_s: float) -> None:
        nan = math.nan
        index = self._metrics.class_index(request.class_name)
        self._metrics.finish((request.request_id, index, request.arrival_s, request.prompt_tokens, 0, 0, nan, nan, now_s, 0, -1, ERROR))

    def provisioned_s(self, end_s: float) -> float:
        """Seconds for which replicas were paid, until ``end_s``."""
        self.fleet.close(end_s)
        return self.fleet.ledger.provisioned_s

    def report(self, end_s: float) -> dict[str, Any]:
        """The ``fleet`` part of summary.json; ask after the metrics' summary."""
        ledger = self.fleet.ledger
        report: dict[str, Any] = {
            "provisioned_replica_s": self.provisioned_s(end_s),
            "cold_start_s": self.stages,
            "changes": [{"at_s": at_s, "replica": index, "state": state} for at_s, index, state in ledger.changes],
        }
        if self._faults is not None:
            faults = self._scenario.faults
            wanted = faults.recovered if faults.recovered is not None else self._scenario.slo.attainment
            recovered = recovery_s([at_s for at_s, _ in self._faults.struck], self._metrics.timeline(), wanted, faults.window_s)
            report["retried"], report["failed"] = ledger.retried, ledger.failed
            report["faults"] = [
                {"at_s": at_s, "kind": fault.kind, "recovery_s": seconds} for (at_s, fault), seconds in zip(self._faults.struck, recovered)
            ]
        return report


def attach(cluster: Cluster | Disaggregated, scenario: Scenario, parts: dict[str, Parts], metrics: Metrics) -> Dynamics | None:
    """Attach what the scenario asks for; None when its fleet stays as it is. Raises InputError for what cannot be."""
    if scenario.cluster.autoscaling is None and scenario.faults is None:
        return None
    if isinstance(cluster, Disaggregated):
        raise InputError("faults", "a fleet with pools takes no faults yet")
    return Dynamics(cluster, parts["replicas"], metrics)
