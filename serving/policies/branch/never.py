"""Compute at once."""

from __future__ import annotations


class Never:
    """Never looks into the cache: what a stage without one does."""

    def cached(self, key: int) -> bool:
        """No."""
        return False

    def observe(self, key: int, hit: bool, lookup_s: float | None) -> None:
        """There is nothing to learn."""
