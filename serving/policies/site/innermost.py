"""Everything at the centre."""

from __future__ import annotations

from serving.policies.protocols import Way
from serving.request import Request


class Innermost:
    """The last site on the way inwards: what a fleet without an edge does."""

    def serve_at(self, request: Request, way: Way) -> int:
        """The last."""
        return len(way.levels) - 1
