"""The sequence admitted last gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.running import Running
    from serving.sequence import Sequence


class Latest:
    """Last in, first out: the oldest work is never undone by newer work."""

    def choose(self, running: Running, beneficiary: Sequence | None) -> Sequence | None:
        """The latest of all, or of those strictly less urgent than the beneficiary."""
        return running.latest(None if beneficiary is None else beneficiary.request.priority)
