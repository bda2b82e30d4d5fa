"""Requests go where their prefix was served last, unless that replica is too loaded."""

from __future__ import annotations

from collections import OrderedDict

from serving.errors import InputError
from serving.policies.protocols import Fleet
from serving.request import Request


class PrefixAffinity:
    """Score of a replica: ``cached tokens it should hold − load_weight × outstanding tokens``; the highest wins.

    The router remembers which replica each prefix block went to (the latest ``memory_blocks`` of them): what it believes to be
    cached, not what is. With a load term a popular prefix spreads to a second replica once its first is busy.
    """

    needs_load = True

    def __init__(self, *, load_weight: float = 0.5, memory_blocks: int = 1_000_000, signal_age_s: float = 0.0) -> None:
        if not load_weight >= 0:
            raise InputError("load_weight", f"must not be negative, got {load_weight}")
        if memory_blocks < 1:
            raise InputError("memory_blocks", f"must be at least 1, got {memory_blocks}")
        if not signal_age_s >= 0:
            raise InputError("signal_age_s", f"must not be negative, got {signal_age_s}")
        self.load_weight = load_weight
        self.memory_blocks = memory_blocks
        self.signal_age_s = signal_age_s
        self._served: OrderedDict = OrderedDict()  # prefix key -> replicas that served it, the latest last

    def route(self, request: Request, fleet: Fleet) -> int:
        """The best score; the least loaded, then the lowest index, among equals."""
        least = fleet.least_outstanding()
        outstanding = fleet.outstanding_tokens
        best, best_score = least, -self.load_weight * outstanding[least]
        keys = request.prefix_hashes
        if keys:
            tokens_per_key = request.prompt_tokens // len(keys)
            for replica, blocks in self._believed(keys).items():
                score = blocks * tokens_per_key - self.load_weight * outstanding[replica]
                if score > best_score:
                    best, best_score = replica, score
            self._remember(keys, best)
        return best

    def _believed(self, keys: tuple) -> dict[int, int]:
        """Blocks of this prefix that each replica should hold, most recent replicas first."""
        held: dict[int, int] = {}
        for depth in range(len(keys), 0, -1):
            for replica in reversed(self._served.get(keys[depth - 1], ())):
                held.setdefault(replica, depth)
        return held

    def _remember(self, keys: tuple, replica: int) -> None:
        served = self._served
        for key in keys:
            replicas = tuple(other for other in served.pop(key, ()) if other != replica)
            served[key] = (*replicas[-3:], replica)
        while len(served) > self.memory_blocks:
            served.popitem(last=False)
