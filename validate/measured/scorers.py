"""Routing policies of the measured ladder that the product has no other use for."""

from __future__ import annotations

from collections import OrderedDict

from serving.policies.protocols import Fleet
from serving.request import Request
from serving.rng import stream


class Random:
    """Any replica, evenly."""

    def __init__(self, *, replicas: int, seed: int = 1) -> None:
        self._replicas = replicas
        self._draws = stream(seed, "routing.random")

    def route(self, request: Request, fleet: Fleet) -> int:
        """Draw a replica."""
        return int(self._draws.integers(self._replicas))


class Scored:
    """Weighted scores between 0 and 1, the highest sum wins: the share of the prompt that the router believes to be cached, and how far
    a replica is from the most loaded one. The router remembers ``blocks_per_replica`` blocks for each, the latest used."""

    needs_load = True

    def __init__(self, *, replicas: int, prefix_weight: float, load_weight: float, blocks_per_replica: int, signal_age_s: float = 0.0) -> None:
        self.signal_age_s = signal_age_s
        self._prefix_weight, self._load_weight = prefix_weight, load_weight
        self._limit = blocks_per_replica
        self._believed: list[OrderedDict] = [OrderedDict() for _ in range(replicas)]

    def route(self, request: Request, fleet: Fleet) -> int:
        """The best score; the lowest index among equals."""
        keys = request.prefix_hashes
        loads = fleet.outstanding_tokens
        most = max(max(loads), 1)
        scores = [
            self._prefix_weight * _matched(keys, believed) / max(len(keys), 1) + self._load_weight * (1.0 - loads[replica] / most)
            for replica, believed in enumerate(self._believed)
        ]
        best = scores.index(max(scores))
        self._remember(keys, self._believed[best])
        return best

    def _remember(self, keys: tuple, believed: OrderedDict) -> None:
        for key in keys:
            believed.pop(key, None)
            believed[key] = None
        while len(believed) > self._limit:
            believed.popitem(last=False)


def _matched(keys: tuple, believed: OrderedDict) -> int:
    return next((i for i, key in enumerate(keys) if key not in believed), len(keys))
