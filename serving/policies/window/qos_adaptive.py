"""A batching window whose size follows the rate of violated latency targets."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.plan import Outcome

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class QosAdaptive:
    """Collects up to ``window`` requests, at most ``max_wait_s``, then admits.

    Every ``period`` outcomes the weighted share of requests whose first token came later than their class allows is compared
    with ``target``: above three times the target the window halves, below half of it the window grows by four, within
    [``smallest``, ``largest``]. Classes are matched by priority: ``weights[p]`` and ``slo_s[p]``, the last entry for all beyond.
    """

    def __init__(
        self, *, start: int = 16, smallest: int = 1, largest: int = 128, target: float = 0.01, period: int = 100,
        weights: tuple[float, ...] = (1.5, 1.0, 0.6), slo_s: tuple[float, ...] = (0.1, 0.3, 2.0), max_wait_s: float = 0.1,
    ) -> None:  # fmt: skip
        if not 1 <= smallest <= start <= largest:
            raise InputError("start", f"needs 1 <= smallest <= start <= largest, got {smallest}, {start}, {largest}")
        if not 0 < target < 1:
            raise InputError("target", f"must lie between 0 and 1, got {target}")
        if len(weights) != len(slo_s) or not weights:
            raise InputError("weights", "needs one weight for each entry of slo_s")
        if period < 1:
            raise InputError("period", f"must be at least 1, got {period}")
        self.window = start
        self.smallest, self.largest = smallest, largest
        self.target = target
        self.period = period
        self.weights, self.slo_s = tuple(weights), tuple(slo_s)
        self.max_wait_s = max_wait_s
        self._recent: deque[tuple[float, bool]] = deque(maxlen=period)
        self._since_change = 0

    def open_s(self, batch: PlanBuilder) -> float:
        """When the present collection opens."""
        return batch.now_s if batch.waiting >= self.window else batch.waiting_since_s + self.max_wait_s

    def observe(self, outcome: Outcome) -> None:
        """Take in one outcome; adapt once per period."""
        rank = min(max(outcome.priority, 0), len(self.weights) - 1)
        violated = not outcome.first_token_s - outcome.arrival_s <= self.slo_s[rank]
        self._recent.append((self.weights[rank], violated))
        self._since_change += 1
        if self._since_change < self.period:
            return
        self._since_change = 0
        rate = sum(weight for weight, bad in self._recent if bad) / sum(weight for weight, _ in self._recent)
        if rate > 3 * self.target:
            self.window = max(self.smallest, self.window // 2)
        elif rate < 0.5 * self.target:
            self.window = min(self.largest, self.window + 4)
