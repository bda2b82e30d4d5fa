"""Shortest prompt first, with ageing."""

from __future__ import annotations

from serving.errors import InputError
from serving.request import Request


class ShortestJob:
    """Fewest prompt tokens first; each second of waiting counts like ``ageing_tokens_per_s`` fewer tokens.

    Linear ageing changes no order over time, so the key is fixed: tokens + ageing · arrival. With ageing a request is passed
    only by those that arrive within prompt_tokens / ageing_tokens_per_s after it; 0 lets long prompts starve.
    """

    def __init__(self, *, ageing_tokens_per_s: float = 500.0) -> None:
        if not ageing_tokens_per_s >= 0:
            raise InputError("ageing_tokens_per_s", f"must not be negative, got {ageing_tokens_per_s}")
        self.ageing_tokens_per_s = ageing_tokens_per_s

    def key(self, request: Request, queue: object) -> tuple:
        """Aged length, arrival, id."""
        return (request.prompt_tokens + self.ageing_tokens_per_s * request.arrival_s, request.arrival_s, request.request_id)
