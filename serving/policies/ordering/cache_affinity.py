"""Requests whose prefix is cached go first, within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.request import Request

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class CacheAffinity:
    """A request may pass up to ``max_passes`` × (its cached share) of the requests that were queued before it.

    The key is the place in the queue minus that bonus, so a request with nothing cached is passed by at most ``max_passes``
    others, whatever arrives: affinity cannot starve it.
    """

    def __init__(self, *, max_passes: int = 32) -> None:
        if max_passes < 0:
            raise InputError("max_passes", f"must not be negative, got {max_passes}")
        self.max_passes = max_passes

    def key(self, request: Request, queue: Scheduler) -> tuple:
        """Discounted place in the queue, id."""
        share = queue.cached_tokens(request) / request.prompt_tokens
        return (queue.submitted - self.max_passes * share, request.request_id)
