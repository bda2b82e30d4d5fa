"""What the user of a request that has just left a replica saw."""

from __future__ import annotations

from typing import NamedTuple

from serving.scenario.model import Targets
from serving.sequence import Sequence


class Latencies(NamedTuple):
    """Seconds; NaN where no token came, None for the time per output token of an answer of one."""

    ttft_s: float
    tpot_s: float | None
    e2e_s: float

    def meet(self, targets: Targets) -> bool:
        """Whether all objectives are met; never by a request without a token."""
        return self.ttft_s <= targets.ttft_s and (self.tpot_s or 0.0) <= targets.tpot_s and self.e2e_s <= targets.e2e_s


def latencies(seq: Sequence, now_s: float) -> Latencies:
    """Of a sequence that leaves at ``now_s``."""
    arrival_s, first_s = seq.request.arrival_s, seq.first_token_s
    return Latencies(first_s - arrival_s, (now_s - first_s) / (seq.generated - 1) if seq.generated > 1 else None, now_s - arrival_s)
