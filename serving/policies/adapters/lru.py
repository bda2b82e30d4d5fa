"""The adapter that was used longest ago leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class Lru:
    """Order of last use; needs to know nothing of the queue."""

    def evict(self, idle: Sequence[str], queue: Scheduler) -> str:
        """The first: ``idle`` comes in order of last use."""
        return idle[0]
