"""Always the same number of draft tokens."""

from __future__ import annotations

from serving.errors import InputError


class Fixed:
    """``tokens`` drafts for every decode, whatever the batch."""

    def __init__(self, *, tokens: int = 4) -> None:
        if not 0 <= tokens <= 64:
            raise InputError("tokens", f"must lie between 0 and 64, got {tokens}")
        self.tokens = tokens

    def draft_tokens(self, decodes: int) -> int:
        """The constant."""
        return self.tokens
