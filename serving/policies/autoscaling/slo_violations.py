"""Scale out when users notice: violations, a queue and busy replicas together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError, nearest

if TYPE_CHECKING:
    from serving.policies.protocols import FleetState


class SloViolations:
    """One replica more when, over the last ``window_s``, more than ``violations`` requests missed an objective while more than
    ``pending`` wait and the replicas are used above ``use``; one fewer after ``calm_s`` without a violation, an empty queue, and
    room on the rest. All three conditions together keep a single slow request from buying a GPU.
    """

    def __init__(
        self, *, window_s: float = 300.0, violations: int = 2, pending: int = 100, use: float = 0.8, calm_s: float = 600.0, signal: str = "occupancy"
    ) -> None:
        if not (window_s > 0 and calm_s > 0):
            raise InputError("window_s", f"window_s and calm_s must be positive, got {window_s} and {calm_s}")
        if violations < 0 or pending < 0 or not 0 <= use <= 1:
            raise InputError("violations", "violations and pending must not be negative and use must lie in [0, 1]")
        if signal not in ("occupancy", "kv", "busy"):
            raise InputError("signal", f"'{signal}' is no signal", nearest(signal, ("occupancy", "kv", "busy")))
        self.window_s, self.calm_s = window_s, calm_s
        self.violations, self.pending, self.use = violations, pending, use
        self.signal = signal

    def target(self, fleet: FleetState) -> int:
        """Replicas wanted."""
        use = fleet.use(self.signal)
        if fleet.violations(self.window_s) > self.violations and fleet.pending > self.pending and use > self.use:
            return fleet.provisioned + 1
        ready = fleet.ready
        calm = fleet.starting == 0 and fleet.pending == 0 and fleet.now_s >= self.calm_s and fleet.violations(self.calm_s) == 0
        if calm and ready > 1 and use * ready / (ready - 1) < self.use:
            return ready - 1
        return fleet.provisioned
