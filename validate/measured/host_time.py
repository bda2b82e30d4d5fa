"""A latency model with another host time per step, so that one set of tables serves a whole fit."""

from __future__ import annotations

from typing import Any

from hwmodels.latency import LatencyModel


class WithHostTime:
    """``inner`` with host time added to every step: ``step_s`` seconds, and ``sequence_s`` for each sequence in it.

    ``inner`` should have none of its own.
    """

    def __init__(self, inner: LatencyModel, step_s: float, sequence_s: float = 0.0) -> None:
        self._inner = inner
        self._step_s = step_s
        self._sequence_s = sequence_s

    def step_s(self, shape: Any) -> float:
        """Seconds of one step."""
        return self._inner.step_s(shape) + (self._step_s + self._sequence_s * (shape.decodes + len(shape.chunks)))

    def run_s(self, shape: Any, steps: int) -> list[float]:
        """Seconds of successive decode-only steps, bit for bit those of ``step_s``."""
        added = self._step_s + self._sequence_s * shape.decodes
        return [seconds + added for seconds in self._inner.run_s(shape, steps)]
