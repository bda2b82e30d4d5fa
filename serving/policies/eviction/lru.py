"""The page that was used longest ago leaves."""

from __future__ import annotations

from collections import OrderedDict


class Lru:
    """By order of use alone."""

    def __init__(self) -> None:
        self._order: dict[int, OrderedDict[object, None]] = {}  # finds its first key at once however many have left before it

    def stored(self, tier: int, key: object) -> None:
        """The newest."""
        self._order.setdefault(tier, OrderedDict())[key] = None

    def used(self, key: object) -> None:
        """It will be stored again, as the newest."""

    def left(self, tier: int, key: object) -> None:
        """Not to be named again."""
        del self._order[tier][key]

    def forgotten(self, key: object) -> None:
        """Nothing else was kept about it."""

    def victim(self, tier: int) -> object | None:
        """The oldest."""
        return next(iter(self._order.get(tier, ())), None)
