"""Layers of several precisions: a step costs what its layers cost, and those of one dtype cost their share of a network all of it."""

from __future__ import annotations

from collections.abc import Sequence

from hwmodels.latency import LatencyModel
from serving.plan import StepShape


class MixedPrecision:
    """Prices steps as the sum over ``parts`` of share x time, each part the whole network with all weights of one dtype.

    Exact for a sum over layers: attention, LM head and host are the same in all parts, and the shares sum to 1.
    """

    def __init__(self, parts: Sequence[tuple[float, LatencyModel]]) -> None:
        self._parts = tuple(parts)
        for name in ("path", "provenance"):
            if hasattr(self._parts[0][1], name):
                setattr(self, name, getattr(self._parts[0][1], name))

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the step."""
        seconds = 0.0
        for share, model in self._parts:
            seconds += share * model.step_s(shape)
        return seconds

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """As ``step_s`` for each step, by the same operations in the same order."""
        total = [0.0] * steps
        for share, model in self._parts:
            total = [sum_s + share * seconds for sum_s, seconds in zip(total, model.run_s(shape, steps))]
        return total
