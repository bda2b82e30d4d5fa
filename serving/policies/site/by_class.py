"""Each class of requests has its tier."""

from __future__ import annotations

from collections.abc import Mapping

from serving.policies.protocols import Way
from serving.request import Request


class ByClass:
    """``tiers`` maps classes to tiers; other classes go to ``default``, or stay at the first site without one.

    Where the tier is not on a request's way (or cannot hold it), the innermost site serves.
    """

    def __init__(self, *, tiers: Mapping[str, str] | None = None, default: str | None = None) -> None:
        self.tiers = dict(tiers or {})
        self.default = default
        self.levels_named = [*self.tiers.values(), *([default] if default is not None else [])]

    def serve_at(self, request: Request, way: Way) -> int:
        """The first site of the class's tier."""
        wanted = self.tiers.get(request.class_name, self.default)
        if wanted is None:
            return 0
        return way.levels.index(wanted) if wanted in way.levels else len(way.levels) - 1
