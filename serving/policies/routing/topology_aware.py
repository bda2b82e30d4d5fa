"""Near replicas over links with room, weighed against how loaded they are."""

from __future__ import annotations

from serving.errors import InputError
from serving.policies.protocols import Fleet
from serving.request import Request


class TopologyAware:
    """Cost of a replica: seconds to deliver the request there + ``token_s`` × outstanding prompt tokens; the smallest wins.

    ``token_s`` is what a queued prompt token costs the one behind it: about one over the replica's prefill rate. Delivery counts 0.8
    of the narrowest link on the shortest path, shared with what is under way; without a topology only load decides.
    """

    needs_load = True

    def __init__(self, *, token_s: float = 5e-5, signal_age_s: float = 0.0) -> None:
        for name, value in (("token_s", token_s), ("signal_age_s", signal_age_s)):
            if not value >= 0:
                raise InputError(name, f"must not be negative, got {value}")
        self.token_s = token_s
        self.signal_age_s = signal_age_s

    def route(self, request: Request, fleet: Fleet) -> int:
        """The cheapest; the lowest index among equals."""
        outstanding = fleet.outstanding_tokens
        online = [replica for replica in range(len(outstanding)) if fleet.online(replica)]
        return min(online, key=lambda replica: (fleet.delivery_s(replica) + self.token_s * outstanding[replica], replica))
