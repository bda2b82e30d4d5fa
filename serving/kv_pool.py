"""KV pages of one replica: counts, reference-counted sharing, and a prefix cache with tail-first eviction.

Cached content is a tree of *extents*: runs of blocks without a branch between them. A sequence's shared blocks are the path
from the root to its extent; whatever else it holds is private and indistinguishable, so it is only counted.

    root ── [system prompt: 40 blocks] ──┬── [user A: 6 blocks]      a path has at least as many references as any
                                         └── [user B: 9 blocks]      of its continuations, so the cache is prefix-closed

Decisions depend on counts and cache order, never on block ids. Unused blocks go first; then the extent that was released
longest ago gives up blocks from its tail. Because a path is released deepest extent first, and its blocks tail first, this
order equals that of a per-block least-recently-released queue (a property test holds it to one).

Block ids exist only when the pool is built with ``named=True`` (the engine, tests). Block 0 is reserved for padding.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from serving.kv_tiers import LowerTiers
from serving.sequence import Sequence


class Extent:
    """A run of cached blocks: ``keys`` in order, ``ids`` beside them in a named pool, ``references`` by sequences."""

    __slots__ = ("children", "ids", "keys", "parent", "references")

    def __init__(self, parent: Extent | None, keys: tuple, ids: list[int] | None, references: int) -> None:
        self.parent = parent
        self.keys = keys
        self.ids = ids
        self.references = references
        self.children: dict = {}


class Hit:
    """The longest cached prefix of a key sequence: whole extents down to ``extent``, plus ``partial`` blocks of ``child``."""

    __slots__ = ("blocks", "child", "extent", "idle_blocks", "partial")

    def __init__(self, extent: Extent, blocks: int, idle_blocks: int, child: Extent | None, partial: int) -> None:
        self.extent = extent
        self.blocks = blocks  # blocks found, the partial ones included
        self.idle_blocks = idle_blocks  # of those, blocks that nobody references now: taking them uses up free blocks
        self.child = child
        self.partial = partial


class KVPool:
    """The paged KV cache of one replica, ``blocks`` pages of ``block_tokens`` tokens, one of which is reserved.

    ``free`` counts the blocks that could be taken now: ``unused`` ones and the ``idle`` cached ones that eviction yields.
    """

    def __init__(
        self, blocks: int, block_tokens: int, *, prefix_caching: bool = True, named: bool = False, lower: LowerTiers | None = None
    ) -> None:
        if blocks < 2 or block_tokens < 1:
            raise ValueError(f"a pool needs at least 2 blocks of at least 1 token, got {blocks} of {block_tokens}")
        self.block_tokens = block_tokens
        self.total = blocks - 1
        self.unused = self.total
        self.free = self.total
        self.prefix_caching = prefix_caching
        self.lower = lower  # where evicted pages go; None: they are forgotten
        self.evictions = 0
        self.root = Extent(None, (), [] if named else None, 1)
        self._idle: OrderedDict[Extent, None] = OrderedDict()
        self._loose: deque[int] | None = deque(range(1, blocks)) if named else None

    # -- counting -------------------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Pages that ``tokens`` KV entries occupy."""
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> None:
        """Take ``count`` private blocks; the caller has checked ``count <= free``."""
        self.free -= count
        if count <= self.unused:
            self.unused -= count
        else:
            self._evict(count - self.unused)
            self.unused = 0

    def _evict(self, count: int) -> None:
        self.evictions += count
        while count:
            extent = next(iter(self._idle))
            size = len(extent.keys)
            gone = min(size, count)
            if self.lower is not None:
                ids = extent.ids
                self.lower.store(reversed(extent.keys[size - gone :]), None if ids is None else reversed(ids[size - gone :]))
            if self._loose is not None:
                self._loose.extend(reversed(extent.ids[size - gone :]))
                del extent.ids[size - gone :]
            if gone == size:
                del self._idle[extent]
                del extent.parent.children[extent.keys[0]]
            else:
                extent.keys = extent.keys[: size - gone]
            count -= gone

    # -- the prefix cache -----------------------------------------------------------------------------------------------

    def match(self, keys: tuple, limit: int) -> Hit:
        """Find the longest cached prefix of ``keys``, at most ``limit`` blocks; changes nothing."""
        extent, blocks, idle = self.root, 0, 0
        while blocks < limit:
            child = extent.children.get(keys[blocks]) if blocks < len(keys) else None
            if child is None:
                break
            size = len(child.keys)
            if blocks + size > limit or child.keys != keys[blocks : blocks + size]:
                partial = min(limit - blocks, _common(child.keys, keys, blocks))
                return Hit(extent, blocks + partial, idle + (0 if child.references else partial), child, partial)
            blocks += size
            if not child.references:
                idle += size
            extent = child
        return Hit(extent, blocks, idle, None, 0)

    def share(self, seq: Sequence, hit: Hit) -> None:
        """Give ``seq`` (which holds nothing) the cached blocks of ``hit``; the idle ones among them stop being free."""
        extent = hit.extent if hit.child is None else self._split(hit.child, hit.partial)
        self._reference(extent)
        seq.extent = extent
        seq.shared_blocks = hit.blocks
        if self._loose is not None:
            seq.table = self._path_ids(extent)

    def _reference(self, extent: Extent) -> None:
        while extent is not self.root:
            if not extent.references:
                del self._idle[extent]
                self.free -= len(extent.keys)
            extent.references += 1
            extent = extent.parent

    def _split(self, extent: Extent, at: int) -> Extent:
        """Cut ``extent`` before block ``at``; the upper part is returned, the lower keeps its identity and its queue place."""
        if at == len(extent.keys):
            return extent
        ids = None if extent.ids is None else extent.ids[:at]
        upper = Extent(extent.parent, extent.keys[:at], ids, extent.references)
        upper.parent.children[upper.keys[0]] = upper
        extent.keys = extent.keys[at:]
        if extent.ids is not None:
            extent.ids = extent.ids[at:]
        extent.parent = upper
        upper.children[extent.keys[0]] = extent
        if not upper.references:
            # Only ever split to be referenced at once, so its place in the queue (right after its tail) is never read.
            self._idle[upper] = None
        return upper

    def publish(self, seq: Sequence, keys: tuple) -> None:
        """Put the next ``len(keys)`` private blocks of ``seq``, whose content now exists, into the cache.

        Where another sequence has published the same content meanwhile, ``seq`` switches to that copy and returns its own.
        """
        if self._loose is not None:
            self.name_blocks(seq, (seq.shared_blocks + len(keys)) * self.block_tokens)
        while keys:
            child = seq.extent.children.get(keys[0])
            if child is None:
                self._append(seq, keys)
                return
            common = _common(child.keys, keys, 0)
            upper = self._split(child, common)
            if not upper.references:
                del self._idle[upper]
                self.free -= common
            upper.references += 1
            self.unused += common
            self.free += common
            if self._loose is not None:
                first = seq.shared_blocks
                self._loose.extend(reversed(seq.table[first : first + common]))
                seq.table[first : first + common] = upper.ids
            seq.extent = upper
            seq.shared_blocks += common
            keys = keys[common:]

    def _append(self, seq: Sequence, keys: tuple) -> None:
        extent = seq.extent
        first = seq.shared_blocks
        ids = None if self._loose is None else seq.table[first : first + len(keys)]
        if extent.references == 1 and not extent.children and extent is not self.root:
            extent.keys += keys  # a leaf that only this sequence references simply grows
            if ids is not None:
                extent.ids.extend(ids)
        else:
            leaf = Extent(extent, keys, ids, 1)
            extent.children[keys[0]] = leaf
            seq.extent = leaf
        seq.shared_blocks += len(keys)

    def release(self, seq: Sequence) -> None:
        """Return all that ``seq`` holds: private blocks become unused, its path is queued for eviction, deepest extent first."""
        private = self.blocks_for(seq.computed) - seq.shared_blocks - seq.dropped
        self.unused += private
        self.free += private
        if self._loose is not None:
            self._loose.extend(reversed((seq.table or [])[seq.shared_blocks :]))
            seq.table = []
        extent = seq.extent
        while extent is not self.root:
            extent.references -= 1
            if not extent.references:
                self._idle[extent] = None
                self.free += len(extent.keys)
            extent = extent.parent
        seq.extent = self.root
        seq.shared_blocks = 0
        seq.dropped = 0

    def drop(self, seq: Sequence, positions: Seq[int]) -> None:
        """Return the private pages at ``positions`` (ascending) among those that ``seq`` holds; the others move up in its table."""
        seq.dropped += len(positions)
        self.unused += len(positions)
        self.free += len(positions)
        if self._loose is not None and seq.table is not None:
            for position in reversed(positions):
                self._loose.append(seq.table.pop(position))

    def roll_back(self, seq: Sequence, computed: int) -> None:
        """Shrink ``seq`` to ``computed`` KV entries; the private pages beyond them become unused."""
        given_back = self.blocks_for(seq.computed) - self.blocks_for(computed)
        seq.computed = computed
        self.unused += given_back
        self.free += given_back
        if self._loose is not None and seq.table is not None:
            keep = self.blocks_for(computed) - seq.dropped
            self._loose.extend(reversed(seq.table[keep:]))
            del seq.table[keep:]

    # -- names ----------------------------------------------------------------------------------------------------------

    def name_blocks(self, seq: Sequence, computed: int) -> list[int]:
        """Extend the block table of ``seq`` to ``computed`` KV entries and return it (named pools only)."""
        if seq.table is None:
            seq.table = []
        for _ in range(self.blocks_for(computed) - seq.dropped - len(seq.table)):
            seq.table.append(self._loose.popleft())
        return seq.table

    def _path_ids(self, extent: Extent) -> list[int]:
        path = []
        while extent is not self.root:
            path.append(extent.ids)
            extent = extent.parent
        return [block for ids in reversed(path) for block in ids]

    # -- invariants -----------------------------------------------------------------------------------------------------

    def cached_keys(self) -> list:
        """Keys of the idle cached blocks in eviction order (the next to go first)."""
        return [key for extent in self._idle for key in reversed(extent.keys)]

    def check(self, holders: Iterable[tuple[Sequence, int]]) -> None:
        """Raise AssertionError unless held + cached + unused blocks equal the total and every count has its owner.

        ``holders`` are the sequences that hold blocks, each with the KV entries it holds.
        """
        references: dict[Extent, int] = {}
        private = 0
        for seq, computed in holders:
            private += self.blocks_for(computed) - seq.shared_blocks - seq.dropped
            depth, extent = 0, seq.extent
            while extent is not self.root:
                references[extent] = references.get(extent, 0) + 1
                depth += len(extent.keys)
                extent = extent.parent
            assert depth == seq.shared_blocks, f"{seq}: path of {depth} blocks, {seq.shared_blocks} counted"
        shared = idle = 0
        stack = list(self.root.children.values())
        while stack:
            extent = stack.pop()
            assert extent.keys and extent.parent.children[extent.keys[0]] is extent
            assert extent.references == references.get(extent, 0), "an extent counts references that nobody holds"
            assert (extent in self._idle) == (extent.references == 0), "idle queue and references disagree"
            if extent.references:
                shared += len(extent.keys)
            else:
                idle += len(extent.keys)
            stack.extend(extent.children.values())
        assert self.free == self.unused + idle, f"free {self.free} is not unused {self.unused} + idle {idle}"
        assert private + shared + idle + self.unused == self.total, (
            f"{private} private + {shared} shared + {idle} idle + {self.unused} unused is not {self.total}"
        )


def _common(a: tuple, b: tuple, start: int) -> int:
    """Length of the common prefix of ``a`` and ``b[start:]``."""
    count = 0
    for x, y in zip(a, b[start : start + len(a)]):
        if x != y:
            break
        count += 1
    return count
