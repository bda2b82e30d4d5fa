"""Each replica in turn."""

from __future__ import annotations

from serving.policies.protocols import Fleet
from serving.request import Request


class RoundRobin:
    """Needs no signal."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, fleet: Fleet) -> int:
        """The next replica in turn."""
        chosen = self._next % len(fleet.outstanding_tokens)
        self._next = chosen + 1
        return chosen
