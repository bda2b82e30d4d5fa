"""Short prompts outside, long ones further in."""

from __future__ import annotations

from collections.abc import Mapping

from serving.errors import InputError
from serving.policies.protocols import Way
from serving.request import Request


class ByLength:
    """``limits`` maps tiers to the longest prompt, in tokens, that they take; tiers that it does not name take any."""

    def __init__(self, *, limits: Mapping[str, int] | None = None) -> None:
        for tier, most in (limits or {}).items():
            if isinstance(most, bool) or not isinstance(most, int) or most < 1:
                raise InputError(f"limits.{tier}", f"must be at least 1 token, got {most!r}")
        self.limits = dict(limits or {})
        self.levels_named = list(self.limits)

    def serve_at(self, request: Request, way: Way) -> int:
        """The first site that takes a prompt as long."""
        limits, prompt_tokens = self.limits, request.prompt_tokens
        for position, level in enumerate(way.levels):
            if prompt_tokens <= limits.get(level, prompt_tokens):
                return position
        return len(way.levels) - 1
