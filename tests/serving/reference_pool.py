"""A KV pool that is obviously right and slow: every block an object, moved one at a time, in one queue of released blocks.

It shares no code and no idea of extents with ``serving.kv_pool``; the tests hold the two to equal counts, hits and order.
"""

from __future__ import annotations

from collections import OrderedDict


class Block:
    """One cached block: named by all keys up to its own."""

    def __init__(self, path: tuple) -> None:
        self.path = path
        self.references = 0


class Holding:
    """What a sequence holds: cached blocks in order, then private ones."""

    def __init__(self) -> None:
        self.shared: list[Block] = []
        self.private = 0


class ReferencePool:
    """``total`` usable blocks; free are the unused ones and the cached ones that nobody references."""

    def __init__(self, total: int) -> None:
        self.unused = total
        self.cached: dict[tuple, Block] = {}
        self.released: OrderedDict[Block, None] = OrderedDict()  # cached and unreferenced, the first released first
        self.evictions = 0

    @property
    def free(self) -> int:
        return self.unused + len(self.released)

    def take(self, holding: Holding, count: int) -> None:
        for _ in range(count):
            if self.unused:
                self.unused -= 1
            else:
                block, _ = self.released.popitem(last=False)
                del self.cached[block.path]
                self.evictions += 1
            holding.private += 1

    def match(self, keys: tuple, limit: int) -> list[Block]:
        found = []
        while len(found) < min(limit, len(keys)) and keys[: len(found) + 1] in self.cached:
            found.append(self.cached[keys[: len(found) + 1]])
        return found

    def _reference(self, block: Block) -> None:
        if not block.references:
            del self.released[block]
        block.references += 1

    def share(self, holding: Holding, blocks: list[Block]) -> None:
        for block in blocks:
            self._reference(block)
            holding.shared.append(block)

    def publish(self, holding: Holding, keys: tuple) -> None:
        """``keys``: all keys of the sequence up to the last block that is to be in the cache."""
        while len(holding.shared) < len(keys):
            path = keys[: len(holding.shared) + 1]
            holding.private -= 1
            if path in self.cached:
                self._reference(self.cached[path])
                self.unused += 1
            else:
                self.cached[path] = Block(path)
                self.cached[path].references = 1
            holding.shared.append(self.cached[path])

    def release(self, holding: Holding) -> None:
        self.unused += holding.private
        for block in reversed(holding.shared):
            block.references -= 1
            if not block.references:
                self.released[block] = None
        holding.shared, holding.private = [], 0

    def cached_keys(self) -> list:
        return [block.path[-1] for block in self.released]
