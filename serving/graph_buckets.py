"""Which CUDA graph a step replays: captured sizes, padding to the next, eager execution beyond the largest.

The default sizes are those vLLM captures: 1, 2, 4, multiples of 8 up to 256, then multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from serving.errors import InputError

Path = Literal["graph", "eager"]


def default_sizes(largest: int = 512) -> tuple[int, ...]:
    """Return the captured sizes up to ``largest``, which is always one of them (0: capture nothing)."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return tuple(sorted({size for size in sizes if size <= largest} | ({largest} if largest > 0 else set())))


class GraphBuckets:
    """Captured sizes with a table from every size to its bucket, so that a look-up costs one index."""

    __slots__ = ("_paths", "largest", "sizes")

    def __init__(self, sizes: Iterable[int], where: str = "graphs.sizes") -> None:
        """``sizes`` are positive token (or sequence) counts. Raises InputError naming ``where``."""
        ordered = sorted(set(sizes))
        if ordered and (ordered[0] < 1 or ordered[-1] > 65536):
            raise InputError(where, f"captured sizes must lie between 1 and 65536, got {ordered[0]} to {ordered[-1]}")
        self.sizes: tuple[int, ...] = tuple(ordered)
        self.largest: int = ordered[-1] if ordered else 0
        paths: list[tuple[int, Path]] = [(0, "eager")]
        for size in ordered:
            paths.extend([(size, "graph")] * (size - len(paths) + 1))
        self._paths = paths

    def path(self, count: int) -> tuple[int, Path]:
        """Return (the size executed, how): the smallest captured size >= ``count`` by graph, or ``count`` itself eagerly."""
        if 0 < count <= self.largest:
            return self._paths[count]
        return count, "eager"
