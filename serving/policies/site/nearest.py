"""Where the user is."""

from __future__ import annotations

from serving.policies.protocols import Way
from serving.request import Request


class Nearest:
    """The first site on the way inwards that can hold the request at all, however busy it is."""

    def serve_at(self, request: Request, way: Way) -> int:
        """The first."""
        return 0
