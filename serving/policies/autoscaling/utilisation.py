"""Keep the use of the replicas near a target, without flapping."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from serving.errors import InputError, nearest

if TYPE_CHECKING:
    from serving.policies.protocols import FleetState


class Utilisation:
    """Out when the use of the ready replicas exceeds ``target``, by as many as bring it back to it; in, one at a time, only when
    the fewer replicas would have stayed below ``target`` x ``margin`` at every decision of the last ``hold_s``.

    The same work on n - 1 replicas uses them n / (n - 1) as much: 0.7 on two would be 1.4 on one, so that is refused. The margin
    keeps work that is constant from flapping, the hold keeps the lull after a new replica has joined from doing so. ``signal``:
    ``occupancy`` (seats taken), ``kv`` (pages in use) or ``busy`` (time in steps; a GPU that decodes a single sequence is busy all
    the time).
    """

    def __init__(self, *, target: float = 0.75, margin: float = 0.9, hold_s: float = 120.0, signal: str = "occupancy") -> None:
        if not 0 < target <= 1:
            raise InputError("target", f"must lie in (0, 1], got {target}")
        if not 0 < margin < 1:
            raise InputError("margin", f"must lie between 0 and 1, got {margin}")
        if signal not in ("occupancy", "kv", "busy"):
            raise InputError("signal", f"'{signal}' is no signal", nearest(signal, ("occupancy", "kv", "busy")))
        if not hold_s >= 0:
            raise InputError("hold_s", f"must not be negative, got {hold_s}")
        self.target_use = target
        self.margin = margin
        self.hold_s = hold_s
        self._low_since_s: float | None = None
        self.signal = signal

    def target(self, fleet: FleetState) -> int:
        """Replicas wanted."""
        use, ready = fleet.use(self.signal), max(fleet.ready, 1)
        low = fleet.starting == 0 and ready > 1 and use * ready / (ready - 1) < self.target_use * self.margin
        if not low:
            self._low_since_s = None
        elif self._low_since_s is None:
            self._low_since_s = fleet.now_s
        if use > self.target_use:
            return max(fleet.provisioned, ceil(use * ready / self.target_use))
        if low and fleet.now_s - self._low_since_s >= self.hold_s:
            self._low_since_s = None
            return ready - 1
        return fleet.provisioned
