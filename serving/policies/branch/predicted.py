"""Look first where that is likely to find something, soon."""

from __future__ import annotations

from serving.errors import InputError


class Predicted:
    """Looks when the predicted hit rate of the key exceeds ``hit_rate`` and the predicted time of a look-up is below ``latency_s``.

    As a branch predictor does, it keeps ``slots`` estimates that keys share by their remainder, each an average that the latest outcome
    moves by ``weight``; what was computed without looking teaches too, because keeping it shows whether it was there. The
    time of look-ups is one average for all keys; while it forbids looking it fades, so that a cache that was slow is tried again.
    """

    def __init__(self, *, hit_rate: float = 0.75, latency_s: float = 0.08, slots: int = 4096, weight: float = 0.3) -> None:
        if not 0 <= hit_rate < 1:
            raise InputError("hit_rate", f"must lie between 0 and 1, got {hit_rate}")
        if not latency_s > 0:
            raise InputError("latency_s", f"must be above 0, got {latency_s}")
        if slots < 1 or not 0 < weight <= 1:
            raise InputError("slots", f"slots must be at least 1 and weight in (0, 1], got {slots} and {weight}")
        self.hit_rate, self.latency_s, self.weight = hit_rate, latency_s, weight
        self._rates = [0.0] * slots
        self._lookup_s = 0.0

    def cached(self, key: int) -> bool:
        """By both predictions."""
        if self._lookup_s >= self.latency_s:
            self._lookup_s *= 1 - self.weight / 10
            return False
        return self._rates[key % len(self._rates)] > self.hit_rate

    def observe(self, key: int, hit: bool, lookup_s: float | None) -> None:
        """Move the averages."""
        slot = key % len(self._rates)
        self._rates[slot] += self.weight * (hit - self._rates[slot])
        if lookup_s is not None:
            self._lookup_s += self.weight * (lookup_s - self._lookup_s)
