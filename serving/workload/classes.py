"""Class and tenant of each request, drawn by share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.scenario.workload import RequestClass, Workload
from serving.workload.context import Context

DEFAULT = RequestClass(name="default")


class Shares:
    """Draws positions in a list with probability share / sum of shares."""

    def __init__(self, shares: Sequence[float], rng: np.random.Generator) -> None:
        self._cumulative = np.cumsum(np.array(shares, dtype=np.float64))
        self._cumulative /= self._cumulative[-1]
        self._rng = rng

    def draw(self, n: int) -> np.ndarray:
        """Return ``n`` positions (int64); nothing is drawn from the stream where there is no choice."""
        if self._cumulative.size == 1:
            return np.zeros(n, dtype=np.int64)
        return np.searchsorted(self._cumulative, self._rng.random(n), side="right").clip(max=self._cumulative.size - 1)


class Labels:
    """The classes and tenants of a workload, with the columns of a request that follow from them."""

    def __init__(self, workload: Workload, context: Context) -> None:
        self.classes = workload.classes or (DEFAULT,)
        self.priorities = [row.priority for row in self.classes]
        self.names = [row.name for row in self.classes]
        self.ttft_slo_s = [context.ttft_slo_s(name) for name in self.names]
        self.tenants = [row.name for row in workload.tenants] or [""]
        self._class_shares = Shares([row.share for row in self.classes], context.rng("classes"))
        self._tenant_shares = Shares([row.share for row in workload.tenants] or [1.0], context.rng("tenants"))

    def draw_classes(self, n: int) -> np.ndarray:
        """Return ``n`` positions in ``classes``."""
        return self._class_shares.draw(n)

    def draw_tenants(self, n: int) -> np.ndarray:
        """Return ``n`` positions in ``tenants``."""
        return self._tenant_shares.draw(n)
