"""Nothing is read back."""

from __future__ import annotations


class Never:
    """Everything that left the GPU is computed again: the baseline for what tiers are worth."""

    def load(self, tokens: int, load_s: float, queue: object) -> bool:
        """No."""
        return False
