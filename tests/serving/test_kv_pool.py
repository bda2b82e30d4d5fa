"""The KV pool: held to an independent per-block reference, to the partition of its block ids, and to case Q4."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from reference_pool import Holding, ReferencePool

from serving.kv_pool import KVPool
from serving.request import Request
from serving.sequence import Sequence

WIDTH = 4
paths = st.lists(st.integers(0, 1), min_size=0, max_size=7)  # a walk in a binary tree: prefixes are shared often, and split


def keys_of(path: list[int]) -> tuple:
    """Chained content keys: each names its block and all before it."""
    return tuple(tuple(path[: i + 1]) for i in range(len(path)))


def sequence(pool: KVPool, request_id: int, keys: tuple = ()) -> Sequence:
    """A sequence that holds nothing yet."""
    return Sequence(Request(request_id, 0.0, 1, 1), (request_id,), keys, pool.root)


class Life:
    """One sequence in both pools."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.holding = Holding()


class PoolsAgree(RuleBasedStateMachine):
    """Random lives of sequences: admitted with what is cached, grown, published, released, in any order."""

    named = False

    @initialize(blocks=st.integers(4, 16))
    def start(self, blocks: int) -> None:
        self.pool = KVPool(blocks, WIDTH, named=self.named)
        self.reference = ReferencePool(blocks - 1)
        self.lives: list[Life] = []
        self.count = 0
        self.content: dict[int, tuple] = {}  # named pools: what each block id holds

    @rule(path=paths, limit=st.integers(0, 7), extra=st.integers(0, 4))
    def admit(self, path: list[int], limit: int, extra: int) -> None:
        keys = keys_of(path)
        hit, expected = self.pool.match(keys, limit), self.reference.match(keys, limit)
        assert hit.blocks == len(expected)
        assert hit.idle_blocks == sum(not block.references for block in expected)
        if extra + hit.idle_blocks > self.pool.free:
            return
        self.count += 1
        life = Life(sequence(self.pool, self.count, keys))
        self.pool.share(life.seq, hit)
        self.reference.share(life.holding, expected)
        life.seq.computed = hit.blocks * WIDTH
        if self.named:
            assert [self.content[block] for block in life.seq.table] == list(keys[: hit.blocks]), "a cached block lost its content"
        self.grow(life, extra)
        self.lives.append(life)

    def grow(self, life: Life, blocks: int) -> None:
        self.pool.take(blocks)
        self.reference.take(life.holding, blocks)
        life.seq.computed += blocks * WIDTH
        if self.named:
            table = self.pool.name_blocks(life.seq, life.seq.computed)
            for index in range(len(table) - blocks, len(table)):
                known = index < len(life.seq.keys)
                self.content[table[index]] = life.seq.keys[index] if known else ("private", life.seq.request_id, index)

    @precondition(lambda self: self.lives)
    @rule(which=st.integers(0, 50), blocks=st.integers(1, 3))
    def continue_one(self, which: int, blocks: int) -> None:
        if blocks <= self.pool.free:
            self.grow(self.lives[which % len(self.lives)], blocks)

    @precondition(lambda self: self.lives)
    @rule(which=st.integers(0, 50), blocks=st.integers(1, 7))
    def publish(self, which: int, blocks: int) -> None:
        seq = (life := self.lives[which % len(self.lives)]).seq
        upto = min(len(seq.keys), seq.computed // WIDTH, seq.shared_blocks + blocks)
        if upto > seq.shared_blocks:
            self.pool.publish(seq, seq.keys[seq.shared_blocks : upto])
            self.reference.publish(life.holding, seq.keys[:upto])

    @precondition(lambda self: self.lives)
    @rule(which=st.integers(0, 50), whole=st.booleans())
    def release(self, which: int, whole: bool) -> None:
        if whole:
            self.publish(which, 7)
        life = self.lives.pop(which % len(self.lives))
        self.pool.release(life.seq)
        self.reference.release(life.holding)

    @invariant()
    def counts_and_order_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, reference = self.pool, self.reference
        assert (pool.free, pool.unused, pool.evictions) == (reference.free, reference.unused, reference.evictions)
        assert pool.cached_keys() == reference.cached_keys()
        assert [life.seq.shared_blocks for life in self.lives] == [len(life.holding.shared) for life in self.lives]
        pool.check((life.seq, life.seq.computed) for life in self.lives)

    @invariant()
    def ids_are_partitioned(self) -> None:
        if not self.named or not hasattr(self, "pool"):
            return
        pool = self.pool
        cached: list[int] = []
        stack = list(pool.root.children.values())
        while stack:
            extent = stack.pop()
            assert [self.content[block] for block in extent.ids] == list(extent.keys), "a cached block lost its content"
            cached += extent.ids
            stack += extent.children.values()
        private: list[int] = []
        for life in self.lives:
            seq = life.seq
            assert set(seq.table[: seq.shared_blocks]) <= set(cached)
            private += seq.table[seq.shared_blocks :]
            for index, block in enumerate(seq.table[: len(seq.keys)]):
                assert self.content[block] == seq.keys[index], "a block was handed out while somebody read it"
        everything = cached + private + list(pool._loose)
        assert sorted(everything) == list(range(1, pool.total + 1)), "an id is lost, held twice, or the reserved block is out"


class NamedPoolsAgree(PoolsAgree):
    """The same lives in a pool that names its blocks."""

    named = True


def walk(machine: type[PoolsAgree], seed: int, steps: int = 150) -> KVPool:
    """A long random history of the machine's rules, weighed so that pools fill up, evict and split; returns the pool."""
    rng = random.Random(seed)
    pools = machine()
    pools.start(rng.randint(6, 20))
    for _ in range(steps):
        which, kind = rng.randint(0, 50), rng.random()
        if kind < 0.45 or not pools.lives:
            path = [rng.choice((0, 0, 1)) for _ in range(rng.randint(0, 7))]
            pools.admit(path, rng.choice((7, 7, 7, rng.randint(0, 7))), rng.randint(0, 4))
        elif kind < 0.6:
            pools.continue_one(which, rng.randint(1, 3))
        elif kind < 0.75:
            pools.publish(which, rng.randint(1, 7))
        else:
            pools.release(which, whole=rng.random() < 0.8)
        pools.counts_and_order_agree()
        pools.ids_are_partitioned()
    return pools.pool


@pytest.mark.parametrize("machine", [PoolsAgree, NamedPoolsAgree])
def test_agrees_with_the_per_block_reference(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80, stateful_step_count=40, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("machine", [PoolsAgree, NamedPoolsAgree])
def test_agrees_with_the_per_block_reference_over_long_histories(machine):
    assert sum(walk(machine, seed).evictions for seed in range(60)) > 1000


def grown(pool: KVPool, request_id: int, keys: tuple, blocks: int) -> Sequence:
    """A sequence that holds ``blocks`` private blocks."""
    seq = sequence(pool, request_id, keys)
    pool.take(blocks)
    seq.computed = blocks * pool.block_tokens
    return seq


def test_case_q4_the_tail_goes_first():
    pool = KVPool(4, 16)
    keys = keys_of([1, 2, 3])
    first = grown(pool, 1, keys, 3)
    pool.publish(first, keys)
    pool.release(first)
    assert (pool.free, pool.unused) == (3, 0)
    other = grown(pool, 2, (), 1)
    assert pool.evictions == 1 and pool.cached_keys() == [keys[1], keys[0]]
    pool.release(other)
    hit = pool.match(keys, 3)
    assert (hit.blocks, hit.idle_blocks) == (2, 2)


def test_the_longest_released_goes_first_and_a_hit_renews():
    pool = KVPool(7, 16)
    for name in (1, 2, 3):
        seq = grown(pool, name, keys_of([name, 0]), 2)
        pool.publish(seq, seq.keys)
        pool.release(seq)
    again = sequence(pool, 4, keys_of([1, 0]))
    pool.share(again, pool.match(again.keys, 2))
    again.computed = 2 * 16
    pool.release(again)
    grown(pool, 5, (), 3)
    assert pool.cached_keys() == [(3,), (1, 0), (1,)], "2 was the oldest, then the tail of 3"


def test_a_shared_prefix_splits_and_outlives_its_branches():
    pool = KVPool(11, 16)
    left, right = keys_of([1, 1, 1]), keys_of([1, 1, 2])
    a = grown(pool, 1, left, 3)
    pool.publish(a, left)
    b = sequence(pool, 2, right)
    hit = pool.match(right, 3)
    assert (hit.blocks, hit.idle_blocks) == (2, 0)
    pool.share(b, hit)
    pool.take(1)
    b.computed = 3 * 16
    pool.publish(b, right[2:])
    pool.check([(a, a.computed), (b, b.computed)])
    pool.release(a)
    assert pool.cached_keys() == [left[2]], "b still references the two common blocks"
    pool.release(b)
    assert pool.cached_keys() == [left[2], right[2], right[1], right[0]]


def test_content_published_twice_is_kept_once():
    pool = KVPool(9, 16, named=True)
    keys = keys_of([1, 1])
    a, b = grown(pool, 1, keys, 2), grown(pool, 2, keys, 2)
    pool.name_blocks(a, a.computed)
    own = list(pool.name_blocks(b, b.computed))
    pool.publish(a, keys)
    pool.publish(b, keys)
    assert b.table == a.table and not set(own) & set(a.table)
    assert pool.unused == 6 and set(own) <= set(pool._loose)
    pool.check([(a, a.computed), (b, b.computed)])


def test_sharing_an_idle_prefix_uses_up_free_blocks():
    pool = KVPool(4, 16)
    keys = keys_of([1, 1, 1])
    seq = grown(pool, 1, keys, 3)
    pool.publish(seq, keys)
    pool.release(seq)
    assert pool.free == 3
    again = sequence(pool, 2, keys)
    pool.share(again, pool.match(keys, 2))
    again.computed = 2 * 16
    assert pool.free == 1
    pool.check([(again, again.computed)])


@pytest.mark.parametrize(("blocks", "width"), [(1, 16), (0, 16), (8, 0)])
def test_a_pool_too_small_is_refused(blocks, width):
    with pytest.raises(ValueError, match="at least"):
        KVPool(blocks, width)


def test_check_finds_a_lost_block():
    pool = KVPool(9, 16)
    seq = grown(pool, 1, (), 3)
    pool.unused -= 1
    with pytest.raises(AssertionError):
        pool.check([(seq, seq.computed)])
