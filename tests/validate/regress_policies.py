"""Policies that break a rule each: what the gate must catch. Loaded by path, as a user's file is."""

from __future__ import annotations

import time

from serving.builder import ADMITTED
from serving.policies.batching.chunked_prefill import ChunkedPrefill


class Lifo:
    """Starves whoever came first."""

    def key(self, request, queue):
        return (-request.arrival_s, request.request_id)


class Arrival:
    """Honest: the same order as fcfs."""

    def key(self, request, queue):
        return (request.arrival_s, request.request_id)


class WallClock:
    """Decides by the time of day."""

    def key(self, request, queue):
        return (time.time(), request.request_id)


class HashOrder:
    """Decides by what differs from process to process."""

    def key(self, request, queue):
        return (round(request.arrival_s, 1), hash(str(request.prompt_tokens)), request.request_id)


class Raises:
    """Fails on a long prompt."""

    def key(self, request, queue):
        if request.prompt_tokens > 900:
            raise KeyError("boom")
        return (request.arrival_s, request.request_id)


class Loops:
    """Never returns on a long prompt."""

    def key(self, request, queue):
        while request.prompt_tokens > 900:
            pass
        return (request.arrival_s, request.request_id)


class NoId:
    """A key that does not end in the id."""

    def key(self, request, queue):
        return (request.arrival_s, request.request_id, request.prompt_tokens)


class Leaks:
    """Takes a block for nobody now and then."""

    def __init__(self):
        self._honest = ChunkedPrefill()

    def plan(self, batch):
        self._honest.plan(batch)
        if batch.scheduler.steps % 50 == 49 and batch.pool.free:
            batch.pool.take(1)


class Stops:
    """Waits when the head of the queue finds no adapter slot."""

    def __init__(self):
        self._honest = ChunkedPrefill()

    def plan(self, batch):
        self._honest.plan(batch, admit=self._admit)

    def _admit(self, batch):
        while batch.waiting and batch.admit() == ADMITTED:
            pass


class Greedy:
    """Overspends the token budget."""

    def __init__(self):
        self._honest = ChunkedPrefill()

    def plan(self, batch):
        batch.tokens_left = 1_000_000
        self._honest.plan(batch)


class Lies:
    """Promises to repeat its decision and does not."""

    def __init__(self):
        self._honest = ChunkedPrefill()

    def plan(self, batch):
        if batch.scheduler.steps % 7 == 3 and batch.running.count > 1:
            batch.preempt(batch.running.latest(None))
        self._honest.plan(batch)
        batch.valid_until(1e9)


class Thrashes:
    """Computes a few tokens of a prompt, drops them, and begins again."""

    def __init__(self):
        self._honest = ChunkedPrefill()

    def plan(self, batch):
        for seq in list(batch.partials):
            batch.preempt(seq)
        batch.max_chunk_tokens = 8
        self._honest.plan(batch)


class Equals:
    """Evicts equals for equals."""

    def choose(self, running, beneficiary):
        return running.latest(None)


class Nobody:
    """Names no victim when one is needed."""

    def choose(self, running, beneficiary):
        return None


class Shuts:
    """Opens in a moment, always in a moment."""

    def open_s(self, batch):
        return batch.now_s + 1e-9


class Elsewhere:
    """Routes to a replica that does not exist."""

    def route(self, request, fleet):
        return 7


class Slow:
    """Admits one request at a time beside what runs: legal, and worse."""

    def open_s(self, batch):
        return batch.now_s if batch.running.count < 2 else batch.now_s + 0.02
