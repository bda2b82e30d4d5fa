"""First come, first served."""

from __future__ import annotations

from serving.request import Request


class Fcfs:
    """Order of arrival. A preempted request keeps its place, which is before all that arrived later."""

    def key(self, request: Request, queue: object) -> tuple:
        """Arrival time, then id."""
        return (request.arrival_s, request.request_id)
