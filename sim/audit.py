"""Holds batching policies to their word: now and then a run is cut short and the policy asked what it would have done."""

from __future__ import annotations

import numpy as np

from serving.errors import BrokenPolicyError
from serving.plan import BatchPlan


class Audit:
    """Cuts runs so that each skipped step is planned again with probability ``share``; ``rng`` chooses where."""

    def __init__(self, share: float, rng: np.random.Generator) -> None:
        self._share = share
        self._rng = rng
        self._promised: tuple[BatchPlan, int] | None = None

    @property
    def waiting(self) -> bool:
        """Whether a run was cut whose next plan has not been seen yet."""
        return self._promised is not None

    def cut(self, plan: BatchPlan, ends: list[float], durations: list[float]) -> None:
        """End the run early at a random step, or leave it as it is."""
        skipped = len(ends) - plan.steps
        if skipped > 0 and self._rng.random() < self._share * skipped:
            keep = int(self._rng.integers(plan.steps, len(ends)))
            del ends[keep:], durations[keep:]
            self._promised = (plan, plan.decodes)

    def forget(self) -> None:
        """Something happened that releases the policy from its promise."""
        self._promised = None

    def check(self, plan: BatchPlan) -> None:
        """Raise BrokenPolicyError unless ``plan``, the first after a cut, is what was promised when the run was declared valid."""
        if self._promised is None:
            return
        (earlier, decodes), self._promised = self._promised, None
        if plan.now_s < earlier.valid_until_s and (plan.chunks or plan.preempted or plan.ended or plan.decodes != decodes):
            policy = type(plan.scheduler.policies.batching).__name__
            raise BrokenPolicyError(
                f"batching policy {policy}, step {plan.step} at {plan.now_s:.6f} s: promised at {earlier.now_s:.6f} s to repeat "
                f"{decodes} decodes until {earlier.valid_until_s:.6f} s, but now plans {plan.decodes} decodes, {len(plan.chunks)} "
                f"chunks and {len(plan.preempted)} preemptions"
            )
