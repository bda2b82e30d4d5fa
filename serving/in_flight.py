"""The plans that are being executed, the oldest first, and what has happened to their sequences since they were made."""

from __future__ import annotations

from serving.plan import BatchPlan
from serving.sequence import DECODING, Sequence


class InFlight:
    """At most ``limit`` plans. Most replicas have one at a time; an engine that plans ahead has two."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._plans: list[BatchPlan] = []

    def add(self, plan: BatchPlan) -> None:
        """Note a plan that is about to run."""
        self._plans.append(plan)
        self.count += 1

    def take(self, plan: BatchPlan) -> None:
        """The result of ``plan`` is here. Raises RuntimeError unless it is the oldest."""
        if not self._plans or self._plans.pop(0) is not plan:
            raise RuntimeError(f"plan {plan.step} is not the oldest in flight")
        self.count -= 1

    def withdraw(self, seq: Sequence) -> int:
        """Nobody waits for the tokens of ``seq`` any more; returns how many are under way."""
        tokens = 0
        for plan in self._plans:
            if seq in plan.completing:
                plan.completing.remove(seq)
                tokens += 1
            elif seq in plan.departed or _decodes_in(plan, seq):
                plan.withdrawn += 1
                tokens += not plan.speculating  # walked decodes count their tokens at commit
        return tokens

    def depart(self, seq: Sequence) -> None:
        """``seq`` is evicted or reaches its cap: in the plans that decode it, it no longer will when their results come."""
        for plan in self._plans:
            if _decodes_in(plan, seq):
                plan.departed = [*plan.departed, seq]

    def tokens_of(self, seq: Sequence) -> int:
        """Tokens of decoding ``seq`` that are under way."""
        return sum(_decodes_in(plan, seq) for plan in self._plans)

    def may_end(self, seq: Sequence) -> bool:
        """Whether waiting ``seq`` was evicted while a plan still in flight produces its next token, which may be its last."""
        return any(seq in plan.departed or seq in plan.completing for plan in self._plans)


def _decodes_in(plan: BatchPlan, seq: Sequence) -> bool:
    return bool(plan.decodes) and seq.state == DECODING and seq.entry_clock < plan.clock
