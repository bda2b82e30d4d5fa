"""Prefix affinity by several routers, each of which knows what it sent itself, and of the others what gossip has told it."""

from __future__ import annotations

from typing import Any

from serving.coherence import Gossip
from serving.errors import InputError
from serving.policies.protocols import Fleet
from serving.policies.routing.prefix_affinity import PrefixAffinity
from serving.request import Request
from serving.rng import stream

KEY_BYTES = 16  # of one prefix key in a message, with the replica that holds it


class GossipAffinity:
    """``routers`` that take the requests in turn and score replicas as ``prefix_affinity`` does, by what each knows (``serving.coherence``).

    They exchange digests every ``period_s`` with ``fanout`` others (0: each tells everybody at once; null: never). With ``f`` above 0 a router asks 2 f others
    before each decision, 2 f + 1 with itself, and learns what they know. Loads are known to all alike.
    """

    needs_load = True

    def __init__(
        self, *, routers: int = 4, period_s: float | None = 1.0, fanout: int = 1, f: int = 0, seed: int = 0, load_weight: float = 0.5,
        memory_keys: int = 1_000_000, stride_blocks: int = 4, signal_age_s: float = 0.0,
    ) -> None:  # fmt: skip
        if routers < 1 or fanout < 1:
            raise InputError("routers" if routers < 1 else "fanout", f"must be at least 1, got {routers if routers < 1 else fanout}")
        if period_s is not None and not period_s >= 0:
            raise InputError("period_s", f"must not be negative, got {period_s}")
        if f < 0 or 2 * f + 1 > routers:
            raise InputError("f", f"a quorum of 2 f + 1 = {2 * f + 1} needs as many routers, there are {routers}")
        options = {"load_weight": load_weight, "memory_keys": memory_keys, "stride_blocks": stride_blocks, "signal_age_s": signal_age_s}
        self.signal_age_s = signal_age_s
        self._f = f
        self._routers = [PrefixAffinity(**options) for _ in range(routers)]
        period = float("inf") if period_s is None else period_s
        self._gossip: Gossip[tuple[tuple, int]] = Gossip(routers, period, fanout, stream(seed, "gossip"), self._learn)
        self._turn = -1

    def _learn(self, router: int, update: tuple[tuple, int]) -> None:
        self._routers[router].remember(*update)

    def route(self, request: Request, fleet: Fleet) -> int:
        """The choice of the router whose turn it is."""
        self._turn = mine = (self._turn + 1) % len(self._routers)
        self._gossip.advance(fleet.now_s)
        if self._f:
            self._gossip.ask(mine, 2 * self._f, fleet.now_s)
        replica = self._routers[mine].route(request, fleet)
        keys = request.prefix_hashes
        if keys:
            self._gossip.publish(mine, (keys, replica), KEY_BYTES * (1 + len(keys) // self._routers[mine].stride_blocks), fleet.now_s)
        return replica

    def report(self) -> dict[str, Any]:
        """What the routers told each other: the ``coherence`` part of a summary."""
        return {"coherence": self._gossip.report()}
