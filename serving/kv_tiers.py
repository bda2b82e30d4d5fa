"""Where evicted KV pages go: host memory, then disk; each tier keeps what was used last and passes the rest down.

A tier holds copies by content key, one page each. What is found there can be loaded instead of computed, and a preempted
sequence finds its own pages again: swapping is this cache applied to content that only one sequence can name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from serving import policies
from serving.errors import InputError
from serving.policies.eviction.lru import Lru

if TYPE_CHECKING:
    from serving.catalog import Gpu
    from serving.policies.protocols import Eviction
    from serving.scenario.model import KvCache


class Move(NamedTuple):
    """What an engine does before its next step: copy the page ``out`` of or ``in`` to ``block``, or ``forget`` the copy."""

    kind: str
    key: object
    block: int


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier: its capacity in pages and what moving a page costs. Rates are of one GPU's share of the link, in each direction."""

    name: str
    blocks: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0  # before the first byte of a load


class LowerTiers:
    """The tiers below the GPU, nearest first. A tier that is full passes a page down, or forgets it, as ``eviction`` says.

    A pinned page stays in the tier where it is. Where all must stay, the page that comes is passed down instead.
    """

    def __init__(self, specs: Iterable[TierSpec], block_bytes: float, eviction: Eviction | None = None) -> None:
        self.specs = tuple(specs)
        self.eviction = eviction or Lru()
        self.block_bytes = block_bytes  # of a page, on one GPU
        self._pages: list[set] = [set() for _ in self.specs]
        self._pinned: set = set()
        self._reading: list = []  # pinned because the plan being made reads them back
        self.stored = [0] * len(self.specs)  # pages written to each tier so far
        self.loaded = [0] * len(self.specs)  # pages read from each tier so far
        self.forgotten = 0  # pages that left the last tier
        self.names = False  # whether blocks have names, so that somebody makes the moves
        self.moves: list[Move] = []  # decided and not yet made; only where blocks have names

    def store(self, keys: Iterable, blocks: Iterable[int] | None = None) -> None:
        """Take in pages that the GPU evicts, in the order in which they go; ``blocks`` are their names, if they have any."""
        if blocks is None:
            for key in keys:
                self._put(0, key)
            return
        self.names = True
        for key, block in zip(keys, blocks):
            if not any(key in pages for pages in self._pages):
                self.moves.append(Move("out", key, block))
            self._put(0, key)

    def take_moves(self) -> list[Move]:
        """The moves decided since the last call, in order."""
        moves, self.moves = self.moves, []
        return moves

    def _put(self, tier: int, key: object) -> None:
        if tier == len(self.specs):
            if any(key in pages for pages in self._pages):
                return  # a nearer tier has taken it in again
            self.forgotten += 1
            self.eviction.forgotten(key)
            if self.names:
                self.moves.append(Move("forget", key, 0))
            return
        pages, policy, victim = self._pages[tier], self.eviction, None
        if key in pages:
            if key not in self._pinned:  # it is the newest again
                policy.left(tier, key)
                policy.stored(tier, key)
            return
        if len(pages) >= self.specs[tier].blocks:
            victim = policy.victim(tier)
            if victim is None:  # all must stay
                self._put(tier + 1, key)
                return
            policy.left(tier, victim)
            pages.remove(victim)
        pages.add(key)
        self.stored[tier] += 1
        if key not in self._pinned:
            policy.stored(tier, key)
        if victim is not None and not any(victim in lower for lower in self._pages[tier + 1 :]):
            self._put(tier + 1, victim)

    def pin(self, keys: Iterable) -> None:
        """Keep these pages wherever they are until ``unpin``."""
        for key in keys:
            if key not in self._pinned:
                self._pinned.add(key)
                for tier in self._tiers_of(key):
                    self.eviction.left(tier, key)

    def unpin(self, keys: Iterable) -> None:
        """Let these pages move again."""
        for key in keys:
            if key in self._pinned:
                self._pinned.remove(key)
                for tier in self._tiers_of(key):
                    self.eviction.stored(tier, key)

    def _tiers_of(self, key: object) -> list[int]:
        return [tier for tier, pages in enumerate(self._pages) if key in pages]

    def find(self, keys: tuple, first: int, limit: int) -> list[int]:
        """Pages by tier that continue a prefix whose first ``first`` pages are on the GPU, up to ``limit`` pages in all."""
        found = [0] * len(self.specs)
        for key in keys[first:limit]:
            tier = next((tier for tier, pages in enumerate(self._pages) if key in pages), None)
            if tier is None:
                break
            found[tier] += 1
        return found

    def load(self, keys: Iterable) -> None:
        """Pages are read back to the GPU by the step being planned: none of them leaves before that has happened."""
        for key in keys:
            tiers = self._tiers_of(key)
            self.loaded[tiers[0]] += 1
            if key not in self._pinned:
                self._pinned.add(key)
                self._reading.append(key)
                for tier in tiers:
                    self.eviction.left(tier, key)
            self.eviction.used(key)

    def landed(self) -> None:
        """What was being read has been: those pages may leave again, as the newest."""
        if self._reading:
            reading, self._reading = self._reading, []
            self.unpin(reading)

    def load_s(self, found: Iterable[int]) -> float:
        """Seconds to read ``found`` pages by tier, one tier after the other (they end on the same link to the GPU)."""
        return sum(spec.latency_s + count * self.block_bytes / spec.read_bytes_per_s for spec, count in zip(self.specs, found) if count)

    def pages(self, tier: int) -> int:
        """Pages in a tier now."""
        return len(self._pages[tier])

    def check(self) -> None:
        """Raise AssertionError when a tier holds more than it can."""
        for spec, pages in zip(self.specs, self._pages):
            assert len(pages) <= spec.blocks, f"{spec.name} holds {len(pages)} of {spec.blocks} pages"


def build_tiers(cache: KvCache, gpu: Gpu, kv_bytes_per_token: float) -> LowerTiers | None:
    """The KV tiers of a scenario below one replica's GPUs; None without any. Raises InputError for a tier smaller than a page."""
    link = gpu.pcie
    if not cache.tiers:
        return None
    if not cache.prefix_caching:
        raise InputError("kv_cache.tiers", "keep pages by their content, which needs kv_cache.prefix_caching")
    block_bytes = cache.block_tokens * kv_bytes_per_token
    specs = []
    for index, tier in enumerate(cache.tiers):
        blocks = int(tier.gib * 2**30 // block_bytes)
        if blocks < 1:
            raise InputError(f"kv_cache.tiers[{index}].gib", f"{tier.gib} GiB hold no page of {block_bytes} bytes")
        read = tier.read_bytes_per_s or link.bytes_per_s * link.efficiency
        latency_s = link.latency_s if tier.latency_s is None else tier.latency_s
        specs.append(TierSpec(tier.name, blocks, read, tier.write_bytes_per_s or read, latency_s))
    chosen = cache.eviction
    return LowerTiers(specs, block_bytes, policies.load("eviction", chosen.name, chosen.options, where=chosen.where))
