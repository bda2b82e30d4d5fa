"""The adapter that the fewest waiting requests ask for leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serving.sequence import WAITING

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class LeastWanted:
    """Spares the loads that are foreseeable; costs a walk through the queue for each eviction."""

    def evict(self, idle: Sequence[str], queue: Scheduler) -> str:
        """The one with the fewest waiting requests; the one used longest ago among equals."""
        wanted = Counter(seq.request.adapter for seq in queue.live() if seq.state == WAITING)
        return min(idle, key=lambda name: wanted[name])
