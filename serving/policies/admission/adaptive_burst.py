"""A rate limit whose burst follows how the fleet copes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.plan import Outcome
from serving.policies.admission.token_bucket import TokenBucket
from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class AdaptiveBurst:
    """A token bucket that fills at ``tokens_per_s``. What it may hold grows by ``step_tokens`` with every ``period`` outcomes in a row
    that met their first-token objective, up to ``max_burst_tokens``, and halves with one that missed, down to ``min_burst_tokens``.

    Bursts are free while somebody has room for them, and the first to go when nobody has. Whatever can never fit is refused too.
    """

    def __init__(
        self, *, tokens_per_s: float, min_burst_tokens: float, max_burst_tokens: float, step_tokens: float = 1000.0, period: int = 20
    ) -> None:
        if not 0 < min_burst_tokens <= max_burst_tokens:
            raise InputError("min_burst_tokens", f"must lie in (0, max_burst_tokens], got {min_burst_tokens} of {max_burst_tokens}")
        if not step_tokens > 0 or period < 1:
            raise InputError("step_tokens", f"step_tokens must be positive and period at least 1, got {step_tokens} and {period}")
        self.min_burst_tokens, self.max_burst_tokens = min_burst_tokens, max_burst_tokens
        self.step_tokens, self.period = step_tokens, period
        self._bucket = TokenBucket(tokens_per_s=tokens_per_s, burst_tokens=min_burst_tokens)
        self._met = 0

    @property
    def burst_tokens(self) -> float:
        """What the bucket may hold now."""
        return self._bucket.burst_tokens

    def admit(self, request: Request, queue: Scheduler) -> str | None:
        """Take the request's tokens out of the bucket, or name the limit."""
        return "adaptive_burst" if (refusal := self._bucket.admit(request, queue)) == "token_bucket" else refusal

    def retry_after_s(self, request: Request, queue: Scheduler) -> float | None:
        """Seconds until the bucket will hold enough; None when its present burst never does."""
        return self._bucket.retry_after_s(request, queue)

    def observe(self, outcome: Outcome) -> None:
        """Take in one outcome and adapt the burst."""
        bucket = self._bucket
        if outcome.first_token_s - outcome.arrival_s <= outcome.ttft_slo_s:
            self._met += 1
            if self._met % self.period == 0:
                bucket.burst_tokens = min(self.max_burst_tokens, bucket.burst_tokens + self.step_tokens)
        else:
            self._met = 0
            bucket.burst_tokens = max(self.min_burst_tokens, bucket.burst_tokens / 2)
