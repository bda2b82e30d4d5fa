"""Where the first token is expected soonest."""

from __future__ import annotations

from collections.abc import Mapping

from serving.errors import InputError
from serving.policies.protocols import Way
from serving.request import Request

PerTier = float | Mapping[str, float]


class Quickest:
    """Seconds expected at a site: the round trip + ``token_s`` × prompt tokens + ``waiting_s`` × waiting requests a replica; the least wins.

    Both are numbers, or map tiers to numbers: what a prompt token costs there, and what one request that waits costs the next. A tier
    left out costs nothing, so name all or none.
    """

    def __init__(self, *, token_s: PerTier = 5e-5, waiting_s: PerTier = 0.03) -> None:
        self.token_s, self.waiting_s = token_s, waiting_s
        self.levels_named: list[str] = []
        for name, given in (("token_s", token_s), ("waiting_s", waiting_s)):
            values = given if isinstance(given, Mapping) else {"": given}
            for level, value in values.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                    raise InputError(f"{name}.{level}".rstrip("."), f"must be a number that is not negative, got {value!r}")
            self.levels_named += [level for level in values if level]

    def serve_at(self, request: Request, way: Way) -> int:
        """The least expected; the outermost among equals."""
        return min(range(len(way.levels)), key=lambda position: (self._expected_s(request, way, position), position))

    def _expected_s(self, request: Request, way: Way, position: int) -> float:
        level = way.levels[position]
        waiting = way.waiting(position) / way.replicas[position]
        return way.round_trip_s[position] + _of(self.token_s, level) * request.prompt_tokens + _of(self.waiting_s, level) * waiting


def _of(value: PerTier, level: str) -> float:
    return value.get(level, 0.0) if isinstance(value, Mapping) else value
