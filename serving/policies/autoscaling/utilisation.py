"""Keep the use of the replicas near a target, without flapping."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from serving.errors import InputError, nearest

if TYPE_CHECKING:
    from serving.policies.protocols import FleetState


class Utilisation:
    """Out when the use of the ready replicas exceeds ``target``, by as many as bring it back to it; in, one at a time, only when
    the fewer replicas would stay below ``target`` x ``margin``.

    The same work on n - 1 replicas uses them n / (n - 1) as much: 0.7 on two would be 1.4 on one, so that is refused. As the
    margin is below 1, constant work never flaps. ``signal``: ``occupancy`` (seats taken), ``kv`` (pages in use) or ``busy`` (time
    in steps; a GPU that decodes a single sequence is busy all the time).
    """

    def __init__(self, *, target: float = 0.75, margin: float = 0.9, signal: str = "occupancy") -> None:
        if not 0 < target <= 1:
            raise InputError("target", f"must lie in (0, 1], got {target}")
        if not 0 < margin < 1:
            raise InputError("margin", f"must lie between 0 and 1, got {margin}")
        if signal not in ("occupancy", "kv", "busy"):
            raise InputError("signal", f"'{signal}' is no signal", nearest(signal, ("occupancy", "kv", "busy")))
        self.target_use = target
        self.margin = margin
        self.signal = signal

    def target(self, fleet: FleetState) -> int:
        """Replicas wanted."""
        use, ready = fleet.use(self.signal), max(fleet.ready, 1)
        if use > self.target_use:
            return max(fleet.provisioned, ceil(use * ready / self.target_use))
        if fleet.starting == 0 and ready > 1 and use * ready / (ready - 1) < self.target_use * self.margin:
            return ready - 1
        return fleet.provisioned
