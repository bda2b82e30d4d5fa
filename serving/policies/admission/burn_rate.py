"""A circuit breaker: shed load while the error budget burns too fast."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.plan import Outcome
from serving.policies.admission.fits import Fits
from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class BurnRate:
    """Opens when, of the requests that left within ``window_s``, the share that missed its first-token objective exceeds
    ``burn`` times the ``budget``; then refuses requests of priority ``sheds_from`` and beyond for ``open_s``, and closes again.

    At least ``least`` outcomes decide. Whatever can never fit is refused too.
    """

    def __init__(
        self, *, budget: float = 0.01, burn: float = 10.0, window_s: float = 60.0, open_s: float = 10.0, least: int = 20, sheds_from: int = 1
    ) -> None:
        if not 0 < budget < 1 or not burn > 0:
            raise InputError("budget", f"budget must lie between 0 and 1 and burn be positive, got {budget} and {burn}")
        if not (window_s > 0 and open_s > 0) or least < 1:
            raise InputError("window_s", "window_s and open_s must be positive and least at least 1")
        self.limit = budget * burn
        self.window_s, self.open_s, self.least, self.sheds_from = window_s, open_s, least, sheds_from
        self._recent: deque[tuple[float, bool]] = deque()
        self._missed = 0
        self._open_until_s = float("-inf")
        self._fits = Fits()

    def admit(self, request: Request, queue: Scheduler) -> str | None:
        """Refuse what the breaker sheds, or name another limit."""
        if request.priority >= self.sheds_from and queue.now_s < self._open_until_s:
            return "burn_rate"
        return self._fits.admit(request, queue)

    def retry_after_s(self, request: Request, queue: Scheduler) -> float | None:
        """Seconds until the breaker closes."""
        return max(0.0, self._open_until_s - queue.now_s)

    def observe(self, outcome: Outcome) -> None:
        """Take in one outcome and open the breaker if the budget burns."""
        missed = not outcome.first_token_s - outcome.arrival_s <= outcome.ttft_slo_s
        recent = self._recent
        recent.append((outcome.finish_s, missed))
        self._missed += missed
        while recent[0][0] < outcome.finish_s - self.window_s:
            self._missed -= recent.popleft()[1]
        if len(recent) >= self.least and self._missed > self.limit * len(recent) and outcome.finish_s >= self._open_until_s:
            self._open_until_s = outcome.finish_s + self.open_s
