"""Look first."""

from __future__ import annotations


class Always:
    """Looks into the cache, whatever came of it before."""

    def cached(self, key: int) -> bool:
        """Yes."""
        return True

    def observe(self, key: int, hit: bool, lookup_s: float | None) -> None:
        """There is nothing to learn."""
