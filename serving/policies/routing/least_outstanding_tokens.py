"""The replica with the fewest prompt tokens routed and unfinished."""

from __future__ import annotations

from serving.errors import InputError
from serving.policies.protocols import Fleet
from serving.request import Request


class LeastOutstandingTokens:
    """Finishes are seen up to ``signal_age_s`` late (0: at once); what the router sent itself counts immediately."""

    needs_load = True

    def __init__(self, *, signal_age_s: float = 0.0) -> None:
        if not signal_age_s >= 0:
            raise InputError("signal_age_s", f"must not be negative, got {signal_age_s}")
        self.signal_age_s = signal_age_s

    def route(self, request: Request, fleet: Fleet) -> int:
        """The least loaded; the lowest index among equals."""
        return fleet.least_outstanding()
