"""What is due when: arrivals, later turns, submissions and aborts handed in by other threads, each at its own instant."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from serving.instants import ARRIVAL

Event = Callable[[Any], None]


class Timeline:
    """Events of one engine in order of (time, priority, when they were added); ``now`` is the instant being lived through.

    The engine's thread calls ``at`` and ``run_until``. Any thread calls ``hand_in``: the stamp is read under the lock that the engine takes
    when it collects, so nothing is handed in with a stamp that the engine has passed already.
    """

    def __init__(self, stamp_s: Callable[[], float]) -> None:
        """``stamp_s`` reads the engine's clock, in any thread."""
        self.now = 0.0
        self._stamp_s = stamp_s
        self._due: list[tuple[float, int, int, Event]] = []
        self._added = 0
        self._handed_in: deque[tuple[float, Event]] = deque()
        self._arrival = threading.Condition()

    def at(self, time_s: float, callback: Event, priority: int = ARRIVAL) -> None:
        """Call ``callback`` at ``time_s``, or at the next opportunity when that is past."""
        self._added += 1
        heappush(self._due, (time_s, priority, self._added, callback))

    def hand_in(self, callback: Event) -> None:
        """From any thread: let the engine's thread call ``callback`` as of this instant."""
        with self._arrival:
            self._handed_in.append((self._stamp_s(), callback))
            self._arrival.notify()

    def wait_for_hand_in(self, timeout_s: float) -> bool:
        """Sleep until something is handed in, at most ``timeout_s`` (which may be infinite); returns whether it was."""
        with self._arrival:
            if not self._handed_in:
                self._arrival.wait(None if timeout_s == math.inf else timeout_s)
            return bool(self._handed_in)

    def next_s(self) -> float:
        """When the next event is due; infinite when none is known."""
        with self._arrival:
            self._collect()
        return self._due[0][0] if self._due else math.inf

    def run_until(self, until_s: float) -> int:
        """Live through all that is due until then, the end included; returns the number of events."""
        with self._arrival:
            self._collect()
        due, ran = self._due, 0
        while due and due[0][0] <= until_s:
            time_s, _, _, callback = heappop(due)
            if time_s > self.now:
                self.now = time_s
            callback(None)
            ran += 1
        self.now = until_s
        return ran

    def _collect(self) -> None:
        while self._handed_in:
            time_s, callback = self._handed_in.popleft()
            self.at(time_s, callback)
