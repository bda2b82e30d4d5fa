"""Clients that come back after a refusal: with the delay that the refusal told them, or a growing one of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from serving.refusal import FOR_GOOD, retry_after_s
from serving.request import Request
from serving.scenario.workload import Retry
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.environment import ARRIVAL
from sim.replica import Replica


class Retries:
    """Takes back refused requests and submits them again later, with the arrival time they had: whoever waits, waits from then on.

    The n-th pause is ``backoff_s`` times ``factor`` to the power n - 1, or as long as the refusal said if that is longer, and up to
    ``jitter`` of it more. A request that is still refused after ``attempts`` more tries is refused for good, and recorded then.
    """

    def __init__(self, cluster: Cluster | Disaggregated, spec: Retry, rng: np.random.Generator) -> None:
        self._cluster, self._spec, self._rng = cluster, spec, rng
        self._tries: dict[int, int] = {}
        self.refusals = self.retries = self.gave_up = self.waiting = 0
        for replica in cluster.replicas:
            replica.take_back = self._take_back

    def _take_back(self, replica: Replica, request: Request, output_tokens: int, limit: str) -> bool:
        """Whether the client of a refused request will come back with it."""
        if limit in FOR_GOOD:
            return False
        self.refusals += 1
        tries = self._tries.get(request.request_id, 0)
        if tries >= self._spec.attempts:
            self.gave_up += 1
            self._tries.pop(request.request_id, None)
            return False
        self._tries[request.request_id] = tries + 1
        told_s = retry_after_s(request, replica.scheduler)
        pause_s = max(self._spec.backoff_s * self._spec.factor**tries, told_s if told_s is not None and told_s < math.inf else 0.0)
        pause_s *= 1.0 + self._spec.jitter * float(self._rng.random())
        self.retries += 1
        self.waiting += 1
        self._cluster.env.at(self._cluster.env.now + pause_s, lambda event: self._again(request, output_tokens), ARRIVAL)
        return True

    def _again(self, request: Request, output_tokens: int) -> None:
        self.waiting -= 1
        self._cluster.resubmit(request, output_tokens)

    def report(self) -> dict[str, Any]:
        """The ``back_pressure`` part of summary.json."""
        return {"refusals": self.refusals, "retries": self.retries, "gave_up": self.gave_up}
