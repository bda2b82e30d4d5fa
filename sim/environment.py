"""SimPy's environment with absolute times and a total order of events at equal times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush

import simpy

from serving.instants import ARRIVAL, FAULT, PLAN, STEP_END, TRANSFER

__all__ = ["ARRIVAL", "FAULT", "PLAN", "STEP_END", "TRANSFER", "Environment"]


class Environment(simpy.Environment):
    """Adds ``at``: a timeout relative to now cannot hit an absolute time exactly, because now + (t - now) may round."""

    def at(self, time_s: float, callback: Callable[[simpy.Event], None], priority: int) -> simpy.Event:
        """Call ``callback`` at ``time_s`` (not before now), after events of smaller ``priority`` and earlier calls at that time."""
        if time_s < self._now:
            raise ValueError(f"{time_s} s is in the past: it is {self._now} s")
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        event.callbacks.append(callback)
        heappush(self._queue, (time_s, priority, next(self._eid), event))
        return event
