"""Requests go where their prefix was served last, unless that replica is too loaded."""

from __future__ import annotations

from collections import OrderedDict

from serving.errors import InputError
from serving.policies.protocols import Fleet
from serving.request import Request


class PrefixAffinity:
    """Score of a replica: ``cached tokens it should hold − load_weight × outstanding tokens``; the highest wins.

    The router remembers which replicas (the latest four) each prefix went to, at every ``stride_blocks``-th block, the latest
    ``memory_keys`` of them: what it believes to be cached, not what is. With a load term a popular prefix spreads to a second
    replica once its first is busy.
    """

    needs_load = True

    def __init__(self, *, load_weight: float = 0.5, memory_keys: int = 1_000_000, stride_blocks: int = 4, signal_age_s: float = 0.0) -> None:
        if not load_weight >= 0:
            raise InputError("load_weight", f"must not be negative, got {load_weight}")
        if memory_keys < 1 or stride_blocks < 1:
            raise InputError("memory_keys", f"memory_keys and stride_blocks must be at least 1, got {memory_keys} and {stride_blocks}")
        if not signal_age_s >= 0:
            raise InputError("signal_age_s", f"must not be negative, got {signal_age_s}")
        self.load_weight = load_weight
        self.memory_keys = memory_keys
        self.stride_blocks = stride_blocks
        self.signal_age_s = signal_age_s
        self._turn = -1
        self._served: OrderedDict = OrderedDict()  # prefix key -> replicas that served it, the latest last

    def route(self, request: Request, fleet: Fleet) -> int:
        """The best score; among equals the least loaded, idle replicas in turn."""
        outstanding, keys = fleet.outstanding_tokens, request.prefix_hashes
        least = fleet.least_outstanding()
        if keys and outstanding[least] == 0:
            least = self._idle(fleet, least)
        best, best_score = least, -self.load_weight * outstanding[least]
        if keys:
            tokens_per_key = request.prompt_tokens // len(keys)
            for replica, blocks in self._believed(keys).items():
                score = blocks * tokens_per_key - self.load_weight * outstanding[replica]
                if score > best_score and fleet.online(replica):
                    best, best_score = replica, score
            self.remember(keys, best)
        return best

    def _idle(self, fleet: Fleet, first: int) -> int:
        """Of the idle replicas, ``first`` among them, take each in turn: else every new prefix would settle on the first."""
        outstanding = fleet.outstanding_tokens
        for _ in range(len(outstanding)):
            self._turn = (self._turn + 1) % len(outstanding)
            if outstanding[self._turn] == 0:
                return self._turn
        return first

    def _believed(self, keys: tuple) -> dict[int, int]:
        """Blocks of this prefix that each remembered replica should hold."""
        held: dict[int, int] = {}
        for depth in _depths(len(keys), self.stride_blocks):
            replicas = self._served.get(keys[depth - 1])
            if replicas is None:
                break  # what follows a block that nobody served was not served either
            for replica in replicas:
                held[replica] = depth
        return held

    def remember(self, keys: tuple, replica: int) -> None:
        """A request with this prefix went to ``replica``."""
        served = self._served
        for depth in _depths(len(keys), self.stride_blocks):
            key = keys[depth - 1]
            replicas = tuple(other for other in served.pop(key, ()) if other != replica)
            served[key] = (*replicas[-3:], replica)
        while len(served) > self.memory_keys:
            served.popitem(last=False)


def _depths(blocks: int, stride: int) -> list[int]:
    """The depths that are remembered: every ``stride`` blocks, and the whole."""
    depths = list(range(stride, blocks + 1, stride))
    if blocks % stride:
        depths.append(blocks)
    return depths
