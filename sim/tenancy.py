"""Replicas that share GPUs (system A11): the GPU is handed from tenant to tenant, or cut into fixed parts.

A switch of context costs alpha · tenants + beta · memory bandwidth + gamma · kernel residency + epsilon, with the tenants in service
now, the share of bandwidth that the others take, and the share of GPU memory that they occupy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.plan import StepShape
from serving.scenario.parallel import Tenancy

if TYPE_CHECKING:
    from hwmodels.latency import LatencyModel
    from sim.cluster import Cluster
    from sim.replica import Replica


def switch_s(spec: Tenancy, active: int, memory_fraction: float) -> float:
    """Seconds of one switch of context with ``active`` tenants in service, each occupying ``memory_fraction`` of the GPU's memory."""
    bandwidth = (active - 1) / active
    residency = min(1.0, (active - 1) * memory_fraction)
    loaded = spec.alpha_s * active + spec.beta_s * bandwidth + spec.gamma_s * residency
    return loaded * (1.0 - spec.cached if spec.context_cache else 1.0) + spec.epsilon_s


def burden(spec: Tenancy, active: int, memory_fraction: float) -> tuple[float, float]:
    """(factor, seconds added) to a step of one tenant while ``active`` are in service."""
    if spec.share == "partition":  # its own part of the GPU, whoever else is there; nothing is switched
        return float(spec.tenants), 0.0
    return float(active), spec.switches_per_step * switch_s(spec, active, memory_fraction)


class Crowded:
    """A latency model as seen by a tenant that shares its GPU with all others all the time."""

    def __init__(self, alone: LatencyModel, factor: float, added_s: float) -> None:
        self._alone, self._factor, self._added_s = alone, factor, added_s

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return self._factor * self._alone.step_s(shape) + self._added_s

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps."""
        return [self._factor * duration_s + self._added_s for duration_s in self._alone.run_s(shape, steps)]


class SharedGpus:
    """Follows which tenants are in service and slows down those that share a GPU with them, from their next step on."""

    def __init__(self, cluster: Cluster, spec: Tenancy, memory_fraction: float) -> None:
        self._cluster, self._spec, self._memory_fraction = cluster, spec, memory_fraction
        self._active = [0] * (len(cluster.replicas) // spec.tenants)
        self._in_service = [False] * len(cluster.replicas)
        if spec.share == "partition":
            factor, added_s = burden(spec, spec.tenants, memory_fraction)
            for replica in cluster.replicas:
                replica.slow_down(factor, 0.0, added_s)
        else:
            cluster.on_armed = self.changed
            cluster.watch()

    def changed(self, replica: Replica) -> None:
        """``replica`` has been looked at: if it came into service or went out of it, its neighbours are priced anew."""
        now_s = self._cluster.env.now
        busy = replica.executing or replica.next_s <= now_s
        if busy == self._in_service[replica.index]:
            return
        self._in_service[replica.index] = busy
        gpu = replica.index // self._spec.tenants
        self._active[gpu] += 1 if busy else -1
        active = self._active[gpu]
        if not active:
            return
        factor, added_s = burden(self._spec, active, self._memory_fraction)
        for other in self._cluster.replicas[gpu * self._spec.tenants : (gpu + 1) * self._spec.tenants]:
            other.slow_down(factor, now_s, added_s)
            self._cluster.arm(other, quietly=True)
