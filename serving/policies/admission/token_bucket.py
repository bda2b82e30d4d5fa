"""A rate limit in tokens with a burst."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.policies.admission.fits import Fits
from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class TokenBucket:
    """The bucket fills at ``tokens_per_s`` up to ``burst_tokens``; a request takes its prompt tokens, or is refused.

    Whatever can never fit is refused too, and takes nothing.
    """

    def __init__(self, *, tokens_per_s: float, burst_tokens: float) -> None:
        if not tokens_per_s > 0:
            raise InputError("tokens_per_s", f"must be positive, got {tokens_per_s}")
        if not burst_tokens > 0:
            raise InputError("burst_tokens", f"must be positive, got {burst_tokens}")
        self.tokens_per_s = tokens_per_s
        self.burst_tokens = burst_tokens
        self._level = burst_tokens
        self._level_s: float | None = None
        self._fits = Fits()

    def admit(self, request: Request, queue: Scheduler) -> str | None:
        """Take the request's tokens out of the bucket, or name the limit."""
        refusal = self._fits.admit(request, queue)
        if refusal is not None:
            return refusal
        self._fill(queue.now_s)
        if request.prompt_tokens > self._level:
            return "token_bucket"
        self._level -= request.prompt_tokens
        return None

    def _fill(self, now_s: float) -> None:
        if self._level_s is not None:
            self._level = min(self.burst_tokens, self._level + (now_s - self._level_s) * self.tokens_per_s)
        self._level_s = now_s

    def retry_after_s(self, request: Request, queue: Scheduler) -> float | None:
        """Seconds until the bucket will hold enough; None when it never does."""
        if request.prompt_tokens > self.burst_tokens:
            return None
        return max(0.0, request.prompt_tokens - self._level) / self.tokens_per_s
