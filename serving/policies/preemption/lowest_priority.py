"""The least urgent class gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.running import Running
    from serving.sequence import Sequence


class LowestPriority:
    """The latest admitted sequence of the least urgent class that runs."""

    def choose(self, running: Running, beneficiary: Sequence | None) -> Sequence | None:
        """The victim, strictly less urgent than the beneficiary if there is one."""
        return running.least_urgent(None if beneficiary is None else beneficiary.request.priority)
