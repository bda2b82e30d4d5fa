"""Sessions: chains of requests in which each turn waits for the answer to the one before it.

The history of a conversation is content that the cache may hold. With block size b, a turn with prompt P and output O leaves
full blocks 0 … (P + O) // b - 1: those before P // b have the keys of its prompt, the others hold generated tokens and have
the keys ((session, turn), i). The next turn's prompt begins with exactly these keys, then adds its own (session, turn, i).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from serving.request import Arrival, Request
from serving.scenario.workload import Workload
from serving.workload.classes import Labels
from serving.workload.context import Context
from serving.workload.lengths import CHUNK, Draw, one_by_one, seconds, tokens
from serving.workload.prefixes import SharedPrefixes
from serving.workload.sizes import Sizes
from serving.workload.synthetic import bounded


class Turn(NamedTuple):
    """One request of a session: it arrives ``gap_s`` after the answer before it, but not before ``not_before_s`` from the start."""

    arrival: Arrival
    gap_s: float
    not_before_s: float = 0.0
    from_start: bool = False  # its arrival counts from the start of the session: what came before was part of answering it


class Session(NamedTuple):
    """A conversation that starts at ``start_s``; a client drops the turns left when a turn is refused or fails."""

    start_s: float
    turns: tuple[Turn, ...]


def synthetic_sessions(workload: Workload, context: Context) -> Iterator[Session]:
    """Yield the sessions of ``workload`` in order of their start; ids of requests and sessions count from 0 in that order.

    ``requests`` counts turns. A session ends early where its history leaves no room in the longest sequence.
    """
    maker = _Maker(workload, context)
    starts = chain.from_iterable(chunk.tolist() for chunk in bounded(workload, context, limit=workload.requests))
    for start_s in starts:
        left = None if workload.requests is None else workload.requests - maker.requests
        if left == 0:
            return
        yield maker.session(start_s, left)


class _Maker:
    """Draws session by session; counts the requests and sessions made."""

    def __init__(self, workload: Workload, context: Context) -> None:
        spec = workload.sessions
        self._context = context
        self._labels = Labels(workload, context)
        self._sizes = Sizes(workload, self._labels.classes, context)
        self._prefixes = SharedPrefixes(workload.prefix, context) if workload.prefix and context.prefix_caching else None
        self._turns = one_by_one(tokens(spec.turns, context.rng("turns")))
        self._think_s = one_by_one(seconds(spec.think_s, context.rng("turn_think")))
        new: Draw | None = tokens(spec.new_tokens, context.rng("new_tokens")) if spec.new_tokens else None
        self._new_tokens = one_by_one(new) if new else None
        self._first = self._first_turns()
        self.sessions = 0
        self.requests = 0

    def _first_turns(self) -> Iterator[tuple]:
        while True:
            classes, tenants = self._labels.draw_classes(CHUNK), self._labels.draw_tenants(CHUNK)
            groups = self._prefixes.draw(CHUNK) if self._prefixes else [-1] * CHUNK
            yield from zip(classes, tenants.tolist(), groups)

    def session(self, start_s: float, most: int | None) -> Session:
        """Make the next session, of at most ``most`` turns and at least one."""
        kind, tenant, group = next(self._first)
        count = next(self._turns)
        count = count if most is None else min(count, most)
        session, history, keys, turns = self.sessions, 0, (), []
        for turn in range(count):
            prompt, output, caps = (int(column[0]) for column in self._sizes.draw(kind.reshape(1)))
            if turn and self._new_tokens is not None:
                prompt = next(self._new_tokens)
            prompt += history
            if turn:
                if prompt >= self._context.max_model_len:
                    break
                caps = int(self._sizes.caps(kind.reshape(1), kind.reshape(1) * 0 + prompt)[0])
                output = min(output, caps)
            keys = self._keys(keys, history, prompt, (session, turn), group)
            request = Request(
                self.requests, start_s, prompt, caps, self._labels.priorities[kind], self._labels.names[kind], self._labels.tenants[tenant],
                session, keys, (session, turn) if self._context.prefix_caching else None, self._labels.ttft_slo_s[kind],
            )  # fmt: skip
            turns.append(Turn(Arrival(request, output), next(self._think_s) if turn else 0.0))
            self.requests += 1
            history = prompt + output
            keys = self._with_generated(keys, prompt, history, (session, turn))
        self.sessions += 1
        return Session(start_s, tuple(turns))

    def _keys(self, known: tuple, history: int, prompt: int, turn: tuple[int, int], group: int) -> tuple:
        """Return the keys of a prompt: those of the history, then those of what this turn adds."""
        if not self._context.prefix_caching:
            return ()
        blocks = prompt // self._context.block_tokens
        if not history and self._prefixes is not None and group >= 0:
            known = self._prefixes.group_keys(group)[:blocks]
        return (*known, *((*turn, block) for block in range(len(known), blocks)))

    def _with_generated(self, keys: tuple, prompt: int, history: int, turn: tuple[int, int]) -> tuple:
        if not self._context.prefix_caching:
            return ()
        size = self._context.block_tokens
        return (*keys, *((turn, block) for block in range(prompt // size, history // size)))
