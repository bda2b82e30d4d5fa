"""The clocks that an engine's steps may be told by.

real         seconds of this machine: arrivals come at their time, a wait is a wait
normalised   seconds of a machine whose reference step always takes the same time: each step is measured between two runs of a fixed
             reference step and counts (its seconds / median of the latest references) x that time. What slows the machine down slows
             both, and cancels. Waits are skipped
reported     the runner says how long each step took: random workloads, replays of a recording

Instants are chained: a step begins at the very instant the one before ended (or, after a pause, at the arrival that ended the pause)
and ends at begin + duration. So a simulator that adds up the same durations reaches the same instants, to the last bit.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.step import StepOutput
from engine.timeline import Timeline

SPIN_S = 0.0005  # a sleep ends up to this late: the rest of a wait is spun
REFERENCES = 8  # latest reference steps whose median counts


class Lap(NamedTuple):
    """One step by the clock: what it counts, what was measured, and the reference step it was measured by (0: none)."""

    duration_s: float
    measured_s: float
    reference_s: float = 0.0


class Clock(Protocol):
    """``now_s`` may be called by any thread, the rest by the engine's."""

    def start(self) -> None:
        """Time zero is now."""

    def now_s(self) -> float:
        """The present, for what is handed in while the engine runs."""

    def begin(self) -> float:
        """A step begins now, out of any chain; returns its instant."""

    def lap(self, begin_s: float, output: StepOutput) -> Lap:
        """The step that began at ``begin_s`` has just ended."""

    def wait(self, until_s: float, timeline: Timeline) -> None:
        """Return at ``until_s``, or earlier when something is handed in to ``timeline``."""


class RealClock:
    """Seconds of this machine since ``start``."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()

    def start(self) -> None:
        """Time zero is now."""
        self._origin_s = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._origin_s

    def begin(self) -> float:
        """It is what it is."""
        return self.now_s()

    def lap(self, begin_s: float, output: StepOutput) -> Lap:
        """The step took what has passed since it began."""
        seconds = self.now_s() - begin_s
        return Lap(seconds, seconds)

    def wait(self, until_s: float, timeline: Timeline) -> None:
        """Sleep, then spin the last half millisecond."""
        left_s = until_s - self.now_s()
        if left_s > SPIN_S and timeline.wait_for_hand_in(left_s - SPIN_S):
            return
        while self.now_s() < until_s:
            pass


class NormalisedClock:
    """Seconds of a machine on which ``reference`` always takes ``reference_s``."""

    def __init__(self, reference: Callable[[], None], reference_s: float, timer: Callable[[], float] = time.perf_counter) -> None:
        """``timer`` measures: wall time, or the processor time of this thread where the device is this processor."""
        self.reference_s = reference_s
        self._reference = reference
        self._timer = timer
        self._latest: deque[float] = deque(maxlen=REFERENCES)
        self._now_s = 0.0
        self._mark = 0.0

    def start(self) -> None:
        """Time zero is now; run the reference until it is warm and known."""
        for _ in range(2 * REFERENCES):
            self._measure()

    def now_s(self) -> float:
        """The end of the latest step."""
        return self._now_s

    def begin(self) -> float:
        """Measure from here."""
        self._mark = self._timer()
        return self._now_s

    def lap(self, begin_s: float, output: StepOutput) -> Lap:
        """Measure the step against the references before and after it."""
        measured_s = self._timer() - self._mark
        self._measure()
        reference_s = statistics.median(self._latest)
        duration_s = measured_s / reference_s * self.reference_s
        self._now_s = begin_s + duration_s
        return Lap(duration_s, measured_s, reference_s)

    def wait(self, until_s: float, timeline: Timeline) -> None:
        """It is then, at once."""
        self._now_s = until_s
        self._mark = self._timer()

    def _measure(self) -> None:
        begin = self._timer()
        self._reference()
        self._mark = self._timer()
        self._latest.append(self._mark - begin)


class ReportedClock:
    """The time is what the runner says: each step takes its ``device_s``."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def start(self) -> None:
        """Time zero is now."""

    def now_s(self) -> float:
        """The end of the latest step."""
        return self._now_s

    def begin(self) -> float:
        """The end of the latest step."""
        return self._now_s

    def lap(self, begin_s: float, output: StepOutput) -> Lap:
        """The step took what it reports."""
        seconds = output.times.device_s
        self._now_s = begin_s + seconds
        return Lap(seconds, seconds)

    def wait(self, until_s: float, timeline: Timeline) -> None:
        """It is then, at once."""
        self._now_s = until_s
