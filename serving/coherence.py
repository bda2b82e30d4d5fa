"""Cached state that several nodes keep, made coherent by gossip: version vectors, digests, and reads of a quorum (system B5).

Each node numbers the updates it makes itself. A version vector says how many of each node's updates are known; updates of one node are learnt
in order, so that the vector is all there is to say. Vectors form a lattice (F. Mattern, "Virtual time and global states of
distributed systems", 1989): the merge is the elementwise maximum, and what a node knows only ever grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor
from typing import Any, Generic, TypeVar

import numpy as np

from serving.histogram import Histogram

T = TypeVar("T")
COUNTER_BYTES = 8  # of one entry of a digest
_FLUSH = 4096


@dataclass(frozen=True, slots=True)
class VersionVector:
    """How many updates of each node are known."""

    counts: tuple[int, ...]

    @staticmethod
    def zero(nodes: int) -> VersionVector:
        """Nothing is known."""
        return VersionVector((0,) * nodes)

    def after(self, node: int) -> VersionVector:
        """With one more update of ``node``."""
        return VersionVector((*self.counts[:node], self.counts[node] + 1, *self.counts[node + 1 :]))

    def merge(self, other: VersionVector) -> VersionVector:
        """What both know together: the elementwise maximum."""
        return VersionVector(tuple(map(max, self.counts, other.counts)))

    def covers(self, other: VersionVector) -> bool:
        """Whether all that ``other`` knows is known here. Two vectors of which neither covers the other are concurrent."""
        return all(mine >= theirs for mine, theirs in zip(self.counts, other.counts))


@dataclass(slots=True)
class Log(Generic[T]):
    """The updates of one node that somebody still lacks, with when each was made; ``first`` were dropped because everybody has them."""

    first: int = 0
    rows: list[tuple[float, int, T]] = field(default_factory=list)  # made at, bytes, what


class Gossip(Generic[T]):
    """``nodes`` that tell each other of their updates. ``learn(node, update)`` is called when a node comes to know another's update.

    Every ``period_s`` each node in turn exchanges digests with ``fanout`` others, drawn at random, and both then have what either had. A period
    of 0 tells everybody of each update at once; infinity never tells. A message takes no time; digests, answers and updates are counted.
    """

    def __init__(self, nodes: int, period_s: float, fanout: int, rng: np.random.Generator, learn: Callable[[int, T], None]) -> None:
        self.nodes, self.period_s, self.fanout = nodes, period_s, min(fanout, nodes - 1)
        self.known = [VersionVector.zero(nodes)] * nodes
        self.rounds = self.messages = self.bytes = self.updates = 0
        self._rng, self._learn = rng, learn
        self._logs: list[Log[T]] = [Log() for _ in range(nodes)]
        self._next_round = 1
        self._lag = Histogram()
        self._lags_s: list[float] = []

    # -- updates --------------------------------------------------------------------------------------------------------

    def publish(self, node: int, update: T, size_bytes: int, now_s: float) -> None:
        """``node`` has changed its state; it knows that already."""
        self.updates += 1
        if self.nodes == 1:
            return
        self._logs[node].rows.append((now_s, size_bytes, update))
        self.known[node] = self.known[node].after(node)
        if self.period_s == 0:
            for other in range(self.nodes):
                if other != node:
                    self.messages += 1
                    self._tell(node, other, now_s)
            self._forget()

    def advance(self, now_s: float) -> None:
        """Hold the rounds that are due by now."""
        if self.period_s == 0 or self.nodes == 1 or self.period_s == float("inf"):
            return
        due = floor(now_s / self.period_s)
        while self._next_round <= due:
            if all(vector == self.known[0] for vector in self.known):  # they would exchange equal digests
                quiet = due - self._next_round + 1
                self._digests(2 * quiet * self.nodes * self.fanout)
                self.rounds += quiet
                self._next_round = due + 1
                return
            self._round(self._next_round * self.period_s)
            self._next_round += 1

    def ask(self, node: int, others: int, now_s: float) -> None:
        """``node`` reads a quorum: it asks ``others`` nodes, drawn at random, for what it lacks."""
        for other in self._peers(node, min(others, self.nodes - 1)):
            self._digests(1)
            self.messages += 1
            self._tell(other, node, now_s)
        self._forget()

    # -- exchanges ------------------------------------------------------------------------------------------------------

    def _round(self, now_s: float) -> None:
        self.rounds += 1
        for node in range(self.nodes):
            for peer in self._peers(node, self.fanout):
                self._digests(2)
                self.messages += self._tell(node, peer, now_s) + self._tell(peer, node, now_s)
        self._forget()

    def _peers(self, node: int, count: int) -> list[int]:
        if count == self.nodes - 1:
            return [other for other in range(self.nodes) if other != node]
        return [peer + (peer >= node) for peer in self._rng.choice(self.nodes - 1, count, replace=False).tolist()]

    def _digests(self, count: int) -> None:
        self.messages += count
        self.bytes += count * COUNTER_BYTES * self.nodes

    def _tell(self, source: int, target: int, now_s: float) -> bool:
        """Bring ``target`` to know what ``source`` knows; whether there was anything to tell."""
        theirs, ours = self.known[target], self.known[source]
        if theirs.covers(ours):
            return False
        for origin, log in enumerate(self._logs):
            for made_s, size_bytes, update in log.rows[theirs.counts[origin] - log.first : max(0, ours.counts[origin] - log.first)]:
                self.bytes += size_bytes
                self._lags_s.append(max(0.0, now_s - made_s))
                self._learn(target, update)
        self.known[target] = theirs.merge(ours)
        if len(self._lags_s) >= _FLUSH:
            self._flush()
        return True

    def _forget(self) -> None:
        """Drop what everybody has."""
        for origin, log in enumerate(self._logs):
            everywhere = min(vector.counts[origin] for vector in self.known)
            if everywhere > log.first:
                del log.rows[: everywhere - log.first]
                log.first = everywhere

    def _flush(self) -> None:
        self._lag.add(np.array(self._lags_s))
        self._lags_s.clear()

    def report(self) -> dict[str, Any]:
        """For a summary. ``lag_s``: from an update until another node knew it, over all that came to know."""
        self._flush()
        summary = self._lag.summary()
        return {
            "nodes": self.nodes, "updates": self.updates, "rounds": self.rounds, "messages": self.messages, "bytes": self.bytes,
            "learnt": self._lag.count, "lag_s": {key: summary[key] for key in ("mean", "p50", "p99", "max")},
        }  # fmt: skip
