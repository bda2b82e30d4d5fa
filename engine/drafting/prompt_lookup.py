"""Drafts copied from the text itself: what followed the last time that the latest tokens occurred (Saxena 2023).

Nothing is computed on the device. It pays where answers quote their prompts, or repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafting import NOTHING, Ask, Draft
from serving.errors import InputError


class PromptLookup:
    """Looks for the longest suffix of ``longest`` down to ``shortest`` tokens that occurred before; the latest occurrence counts."""

    def __init__(self, *, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest <= 64:
            raise InputError("speculation.proposer", f"needs 1 <= shortest <= longest <= 64, got {shortest} and {longest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._texts: dict[int, _Text] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """What followed the latest earlier occurrence, as far as it is known."""
        return [self._one(ask) for ask in asks]

    def release(self, request_id: int) -> None:
        """Forget its text: it may be read again."""
        self._texts.pop(request_id, None)

    def _one(self, ask: Ask) -> Draft:
        text = self._texts.get(ask.request_id)
        if text is None:
            text = self._texts[ask.request_id] = _Text()
        tokens = ask.tokens
        text.read(tokens, self._sizes)
        for size in self._sizes:
            follows = text.seen.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if follows is not None:
                return Draft(tokens[follows : follows + ask.count])
        return NOTHING


class _Text:
    """Where each short run of a text's tokens, that at its very end left out, was last followed by something."""

    __slots__ = ("read_until", "seen")

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], int] = {}
        self.read_until = 1  # positions that are known as a follower

    def read(self, tokens: list[int], sizes: range) -> None:
        """Take in the tokens that came since the last time."""
        seen = self.seen
        for follower in range(self.read_until, len(tokens)):
            for size in sizes:
                if size <= follower:
                    seen[tuple(tokens[follower - size : follower])] = follower
        self.read_until = len(tokens)
