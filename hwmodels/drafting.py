"""A latency model with the price of making draft tokens on top."""

from __future__ import annotations

from typing import Any

from hwmodels.latency import LatencyModel
from serving.plan import StepShape


class Drafting:
    """Prices a step of ``target``; where decodes verify k drafts, adds k steps of the drafter.

    The drafter is a language model of its own (``drafter``), or takes ``fraction`` of a plain target step for each draft (heads on
    the target, n-gram look-up). Drafts are made one after the other, so their cost adds up.
    """

    def __init__(self, target: LatencyModel, *, drafter: LatencyModel | None = None, fraction: float = 0.0) -> None:
        self._target = target
        self._drafter = drafter
        self._fraction = fraction
        self.run_s = target.run_s
        for name in ("path", "describe", "provenance"):
            if hasattr(target, name):
                setattr(self, name, getattr(target, name))

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the target's step and of the drafts it verifies."""
        seconds = self._target.step_s(shape)
        drafts = shape.query_tokens_per_decode - 1
        return seconds + drafts * self._draft_s(shape) if drafts and shape.decodes else seconds

    def _draft_s(self, shape: Any) -> float:
        plain = StepShape((), shape.decodes, shape.decode_context_tokens, shape.decodes)
        if self._drafter is not None:
            return self._drafter.step_s(plain)
        return self._fraction * self._target.step_s(plain)
