"""No window."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class None_:
    """Admission is always open."""

    def open_s(self, batch: PlanBuilder) -> float:
        """Now."""
        return batch.now_s
