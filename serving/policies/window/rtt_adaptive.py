"""A batching window as long as a share of the round trips that clients see."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.plan import Outcome

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class RttAdaptive:
    """The window is the ``quantile`` of the latest ``samples`` round trips (arrival to first token), within the bounds.

    A client that waits that long anyway does not notice a collection shorter than it; bounds default to 50-200 ms. The wait in
    the window itself is part of a round trip, so only its excess over the window counts: otherwise it would feed on itself.
    """

    def __init__(self, *, shortest_s: float = 0.05, longest_s: float = 0.2, quantile: float = 0.5, samples: int = 64, size: int = 64) -> None:
        if not 0 <= shortest_s <= longest_s:
            raise InputError("shortest_s", f"needs 0 <= shortest_s <= longest_s, got {shortest_s} and {longest_s}")
        if not 0 < quantile < 1:
            raise InputError("quantile", f"must lie between 0 and 1, got {quantile}")
        if samples < 1 or size < 1:
            raise InputError("samples", "samples and size must be at least 1")
        self.shortest_s, self.longest_s = shortest_s, longest_s
        self.quantile = quantile
        self.size = size
        self.window_s = shortest_s
        self._trips: deque[float] = deque(maxlen=samples)

    def open_s(self, batch: PlanBuilder) -> float:
        """When the present collection opens."""
        return batch.now_s if batch.waiting >= self.size else batch.waiting_since_s + self.window_s

    def observe(self, outcome: Outcome) -> None:
        """Take in one round trip and move the window."""
        trip = outcome.first_token_s - outcome.scheduled_s
        if trip != trip:
            return  # it never produced a token
        self._trips.append(trip)
        ordered = sorted(self._trips)
        self.window_s = min(self.longest_s, max(self.shortest_s, ordered[int(self.quantile * len(ordered))]))
