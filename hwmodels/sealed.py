"""A latency model with the host time of sealing what a step sends: so much for each step, and for each sequence that gets a token."""

from __future__ import annotations

from hwmodels.latency import LatencyModel
from serving.plan import StepShape


class Sealed:
    """Prices steps of ``target``; ``step_s`` and ``token_s`` seconds are exposed after them. An accepted draft is sealed with its step's token."""

    def __init__(self, target: LatencyModel, *, step_s: float, token_s: float) -> None:
        self._target, self._step_s, self._token_s = target, step_s, token_s
        for name in ("path", "describe", "provenance"):
            if hasattr(target, name):
                setattr(self, name, getattr(target, name))

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the step, sealing included."""
        rows = shape.logits_rows if shape.chunks else shape.decodes
        return self._target.step_s(shape) + (self._step_s + self._token_s * rows)

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """As ``step_s`` for each step: who gets a token does not change in a run."""
        extra_s = self._step_s + self._token_s * shape.decodes
        return [seconds + extra_s for seconds in self._target.run_s(shape, steps)]
