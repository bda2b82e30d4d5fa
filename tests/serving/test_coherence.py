"""Version vectors are a lattice, gossip converges and tells everybody everything once, and staleness costs hits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.coherence import Gossip, VersionVector
from serving.errors import InputError
from serving.policies import load as load_policy
from serving.rng import stream

NODES = 4
vectors = st.tuples(*[st.integers(0, 5)] * NODES).map(VersionVector)


@given(vectors, vectors, vectors)
def test_the_merge_is_commutative_associative_and_idempotent(a, b, c):
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a and a.merge(VersionVector.zero(NODES)) == a


@given(vectors, vectors, vectors, st.integers(0, NODES - 1))
def test_the_merge_is_the_least_that_covers_both_and_is_monotone(a, b, c, node):
    both = a.merge(b)
    assert both.covers(a) and both.covers(b)
    if c.covers(a) and c.covers(b):
        assert c.covers(both)
    if a.covers(b):
        assert a.merge(c).covers(b.merge(c)) and a.merge(b) == a
    assert a.after(node).covers(a) and not a.covers(a.after(node))
    if a.covers(b) and b.covers(a):
        assert a == b


class Told:
    """What each node has learnt, in order."""

    def __init__(self, nodes: int, period_s: float, fanout: int = 1, seed: int = 0) -> None:
        self.learnt: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
        self.made = [0] * nodes
        self.gossip: Gossip[tuple[int, int]] = Gossip(nodes, period_s, fanout, stream(seed, "gossip"), lambda node, update: self.learnt[node].append(update))

    def publish(self, node: int, now_s: float) -> None:
        self.made[node] += 1
        self.gossip.publish(node, (node, self.made[node]), 10, now_s)

    def check(self) -> None:
        """Each node has learnt of every other exactly what its vector says, in order, once; nobody is told of itself."""
        for node, vector in enumerate(self.gossip.known):
            for origin in range(len(self.made)):
                numbers = [number for source, number in self.learnt[node] if source == origin]
                assert numbers == ([] if origin == node else list(range(1, vector.counts[origin] + 1)))
            assert vector.counts[node] == self.made[node]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.integers(1, 3), st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["publish", "ask", "wait"]), st.integers(1, 6)), max_size=60), st.integers(0, 99))
def test_everybody_learns_everything_once_and_knowledge_only_grows(nodes, fanout, events, seed):
    told, now_s = Told(nodes, 1.0, fanout, seed), 0.0
    for node, what, count in events:
        before = list(told.gossip.known)
        if what == "publish":
            told.publish(node % nodes, now_s)
        elif what == "ask":
            told.gossip.ask(node % nodes, count, now_s)
        else:
            now_s += count / 3
            told.gossip.advance(now_s)
        assert all(new.covers(old) for new, old in zip(told.gossip.known, before))
        told.check()
    told.gossip.advance(now_s + 200.0)
    told.check()
    assert all(vector == VersionVector(tuple(told.made)) for vector in told.gossip.known), "it has converged"
    assert not any(log.rows for log in told.gossip._logs), "what everybody has is dropped"


@pytest.mark.parametrize("nodes", [4, 16, 64])
def test_an_update_reaches_everybody_in_about_logarithmic_time(nodes):
    """Push and pull: the number of nodes that know at least doubles in a round until most do. Twice the logarithm is ample."""
    rounds = []
    for seed in range(30):
        told = Told(nodes, 1.0, 1, seed)
        told.publish(0, 0.0)
        taken = next(n for n in range(1, 100) if told.gossip.advance(float(n)) is None and all(vector.counts[0] for vector in told.gossip.known))
        rounds.append(taken)
    assert max(rounds) <= 2 * math.log2(nodes) and np.mean(rounds) <= 1 + math.log2(nodes)


def test_what_messages_cost():
    told = Told(5, 1.0, 2)
    told.gossip.advance(10.0)
    assert told.gossip.report()["messages"] == 10 * 5 * 2 * 2, "digests there and back, though nothing is new"
    assert told.gossip.report()["bytes"] == 10 * 5 * 2 * 2 * 5 * 8
    at_once = Told(5, 0.0)
    for node in (0, 1, 1):
        at_once.publish(node, 0.5)
    at_once.check()
    report = at_once.gossip.report()
    assert (report["messages"], report["bytes"], report["learnt"]) == (12, 120, 12) and report["lag_s"]["max"] == 0.0


def test_a_reading_of_all_knows_all_and_a_quorum_more_than_one_alone():
    told = Told(5, math.inf)
    for node in range(5):
        told.publish(node, 0.0)
    told.gossip.ask(0, 2, 1.0)
    assert sum(told.gossip.known[0].counts) == 3
    told.gossip.ask(1, 4, 2.0)
    assert told.gossip.known[1] == VersionVector((1,) * 5)
    told.gossip.advance(1e9)
    assert told.gossip.rounds == 0 and sum(told.gossip.known[4].counts) == 1
    told.check()


@pytest.mark.parametrize(
    ("options", "where"),
    [({"routers": 0}, "routers"), ({"fanout": 0}, "fanout"), ({"period_s": -1.0}, "period_s"), ({"routers": 4, "f": 2}, "f"), ({"f": -1}, "f"), ({"load_weight": -1.0}, "load_weight")],
)  # fmt: skip
def test_a_mistake_names_its_option(options, where):
    with pytest.raises(InputError) as caught:
        load_policy("routing", "gossip_affinity", options)
    assert caught.value.where == f"policy.routing.{where}"
