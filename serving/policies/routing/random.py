"""Any replica, with equal chance."""

from __future__ import annotations

import numpy as np

from serving.policies.protocols import Fleet
from serving.request import Request


class Random:
    """Needs no signal. ``seed`` fixes the draws."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def route(self, request: Request, fleet: Fleet) -> int:
        """One of the replicas that take requests."""
        online = [replica for replica in range(len(fleet.outstanding_tokens)) if fleet.online(replica)]
        return online[int(self._rng.integers(len(online)))]
