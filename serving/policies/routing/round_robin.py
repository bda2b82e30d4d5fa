"""Each replica in turn."""

from __future__ import annotations

from serving.policies.protocols import Fleet
from serving.request import Request


class RoundRobin:
    """Needs no signal."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, fleet: Fleet) -> int:
        """The next replica in turn that takes requests."""
        replicas = len(fleet.outstanding_tokens)
        for _ in range(replicas):
            chosen = self._next % replicas
            self._next = chosen + 1
            if fleet.online(chosen):
                break
        return chosen
