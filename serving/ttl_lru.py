"""A cache that forgets: the least recently used first when it is full, and whatever is older than its time to live."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class TtlLru:
    """Values under keys, ``capacity_bytes`` in all. An entry lives ``ttl_s`` from when it was put; a look-up makes it recent, not younger.

    Entries that have expired keep their bytes until they are met: by a look-up, or at the old end when room is needed.
    """

    def __init__(self, capacity_bytes: float, ttl_s: float = math.inf) -> None:
        if not capacity_bytes > 0 or not ttl_s > 0:
            raise ValueError(f"capacity and time to live must be positive, got {capacity_bytes} bytes and {ttl_s} s")
        self.capacity_bytes, self.ttl_s = capacity_bytes, ttl_s
        self.bytes = self.peak_bytes = 0.0
        self.hits = self.misses = self.evicted = self.expired = 0
        self._entries: OrderedDict[Hashable, tuple[float, float, Any]] = OrderedDict()  # until when, bytes, value; the most recent last

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, now_s: float) -> Any:
        """The value, or None; counts as a use."""
        entry = self._entries.get(key)
        if entry is not None and entry[0] <= now_s:
            self._drop(key)
            self.expired += 1
            entry = None
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[2]

    def put(self, key: Hashable, value: Any, size_bytes: float, now_s: float) -> bool:
        """Keep ``value`` from now on, as the most recent; returns whether a live one was there. Larger than the whole cache: not kept."""
        old = self._entries.get(key)
        if old is not None:
            self._drop(key)
        if size_bytes <= self.capacity_bytes:
            while self.bytes + size_bytes > self.capacity_bytes and self._entries:
                until_s = self._drop(next(iter(self._entries)))
                self.expired += until_s <= now_s
                self.evicted += until_s > now_s
            self._entries[key] = (now_s + self.ttl_s, size_bytes, value)
            self.bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return old is not None and old[0] > now_s

    def _drop(self, key: Hashable) -> float:
        until_s, size_bytes, _ = self._entries.pop(key)
        self.bytes = self.bytes - size_bytes if self._entries else 0.0
        return until_s

    def report(self) -> dict[str, Any]:
        """Counts for a summary."""
        asked = self.hits + self.misses
        return {
            "hits": self.hits, "misses": self.misses, "hit_rate": self.hits / asked if asked else None, "entries": len(self), "bytes": self.bytes,
            "peak_bytes": self.peak_bytes, "evicted": self.evicted, "expired": self.expired,
        }  # fmt: skip
