"""Everybody may queue."""

from __future__ import annotations

from serving.request import Request


class Always:
    """Accepts every request; one that can never fit ends when it reaches the head of the queue."""

    def admit(self, request: Request, queue: object) -> str | None:
        """Accept."""
        return None
