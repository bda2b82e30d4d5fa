"""Where the user is, while there is room; what is too much goes further in."""

from __future__ import annotations

from serving.errors import InputError
from serving.policies.protocols import Way
from serving.request import Request


class SpillOver:
    """The first site where fewer than ``max_waiting`` requests a replica wait, those on their way there included; the innermost takes all.

    A request waits until a replica starts its prompt.
    """

    def __init__(self, *, max_waiting: float = 4.0) -> None:
        if not max_waiting > 0:
            raise InputError("max_waiting", f"must be above 0, got {max_waiting}")
        self.max_waiting = max_waiting

    def serve_at(self, request: Request, way: Way) -> int:
        """The first with room."""
        last = len(way.levels) - 1
        return next((position for position in range(last) if way.waiting(position) < self.max_waiting * way.replicas[position]), last)
