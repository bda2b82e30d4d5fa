"""Whoever loses the least work gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.running import Running
    from serving.sequence import Sequence


class LeastProgress:
    """The sequence with the fewest computed tokens (the least to recompute); the latest admitted among equals."""

    def choose(self, running: Running, beneficiary: Sequence | None) -> Sequence | None:
        """The victim, strictly less urgent than the beneficiary if there is one."""
        candidates = running.less_urgent(None if beneficiary is None else beneficiary.request.priority)
        return min(candidates, key=lambda seq: (running.computed(seq), -seq.admission_index), default=None)
