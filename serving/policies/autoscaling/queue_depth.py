"""Scale with the queue: prompt tokens that wait, against what a replica works off in time."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from serving.errors import InputError

if TYPE_CHECKING:
    from serving.policies.protocols import FleetState


class QueueDepth:
    """As many replicas as keep the outstanding prompt tokens of each below ``tokens_per_replica``; in, one at a time, once the rest
    would stay below ``margin`` of it for ``hold_s``.
    """

    def __init__(self, *, tokens_per_replica: float = 20_000.0, margin: float = 0.6, hold_s: float = 60.0) -> None:
        if not tokens_per_replica > 0:
            raise InputError("tokens_per_replica", f"must be positive, got {tokens_per_replica}")
        if not 0 < margin < 1 or not hold_s >= 0:
            raise InputError("margin", f"margin must lie between 0 and 1 and hold_s must not be negative, got {margin} and {hold_s}")
        self.tokens_per_replica, self.margin, self.hold_s = tokens_per_replica, margin, hold_s
        self._low_since_s: float | None = None

    def target(self, fleet: FleetState) -> int:
        """Replicas wanted."""
        tokens, ready = fleet.outstanding_tokens, fleet.ready
        wanted = ceil(tokens / self.tokens_per_replica)
        if wanted > fleet.provisioned:
            self._low_since_s = None
            return wanted
        low = fleet.starting == 0 and ready > 1 and tokens < self.margin * self.tokens_per_replica * (ready - 1)
        if not low:
            self._low_since_s = None
            return fleet.provisioned
        if self._low_since_s is None:
            self._low_since_s = fleet.now_s
        if fleet.now_s - self._low_since_s < self.hold_s:
            return fleet.provisioned
        self._low_since_s = None
        return ready - 1
