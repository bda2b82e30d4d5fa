"""No speculation."""

from __future__ import annotations


class None_:
    """Every decode yields one token."""

    def draft_tokens(self, decodes: int) -> int:
        """None."""
        return 0
