"""Priority classes, optionally with preemption of less urgent work."""

from __future__ import annotations

import math

from serving.errors import InputError, nearest
from serving.request import Request


class Priority:
    """Smaller ``priority`` first, arrival order within a class.

    ``preempt`` says when a waiting request may evict running work of a strictly less urgent class: ``none`` never, ``strict``
    at once, ``deadline`` when its time-to-first-token target is nearer than ``slack_s``. Equal priorities never evict each other.
    """

    def __init__(self, *, preempt: str = "none", slack_s: float = 0.2) -> None:
        if preempt not in ("none", "strict", "deadline"):
            raise InputError("preempt", f"'{preempt}' is not a mode", nearest(preempt, ("none", "strict", "deadline")))
        if not slack_s >= 0:
            raise InputError("slack_s", f"must not be negative, got {slack_s}")
        self.preempt = preempt
        self.slack_s = slack_s

    def key(self, request: Request, queue: object) -> tuple:
        """Priority, arrival time, id."""
        return (request.priority, request.arrival_s, request.request_id)

    def evicts_from_s(self, request: Request) -> float:
        """When ``request`` may evict less urgent work."""
        if self.preempt == "none":
            return math.inf
        if self.preempt == "strict":
            return -math.inf
        return request.arrival_s + request.ttft_slo_s - self.slack_s
