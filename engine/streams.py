"""The tokens of requests on their way through the engine, and a step's inputs made of them.

The scheduler counts; here are the values. A stream holds prompt and generated tokens in one list, so a chunk is a slice of it whether it is
computed for the first time or again after a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import repeat

from engine.sampling import GREEDY, SamplingParams
from engine.step import LAST_SAMPLED, SequenceInput
from serving.kv_pool import KVPool
from serving.plan import BatchPlan
from serving.request import Request
from serving.sequence import DECODING, Sequence


class Stream:
    """One request: ``tokens`` are the prompt and what has been generated; it ends after ``limit`` generated ones, or at a stop token."""

    __slots__ = ("adapter", "limit", "prompt_tokens", "request", "sampling", "seq", "stop_tokens", "token_s", "tokens")

    def __init__(
        self, request: Request, prompt: Seq[int], *, limit: int, stop_tokens: frozenset[int] = frozenset(), sampling: SamplingParams = GREEDY
    ) -> None:
        self.request = request
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.limit = limit
        self.stop_tokens = stop_tokens
        self.sampling = sampling
        self.seq: Sequence | None = None  # the scheduler's side of it
        self.adapter = -1  # the slot of its adapter while it runs
        self.token_s = math.nan  # when its latest token came

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    def end_reason(self) -> str | None:
        """Why it ends with its latest token: ``stop``, ``length``; or None."""
        if self.stop_tokens and self.tokens[-1] in self.stop_tokens:
            return "stop"
        if self.generated < self.limit:
            return None
        return "length" if self.limit >= self.request.max_output_tokens else "stop"


class Decodes:
    """The streams that decode, as parallel lists: a step's entries are then made at the speed of C, and a change costs what changes."""

    def __init__(self, pool: KVPool, *, ahead: bool, retains: bool = False, adapted: bool = False) -> None:
        """``ahead``: steps are launched before the tokens of the step before are known. ``retains``: sequences may give pages back.
        ``adapted``: they may have adapters."""
        self._adapted = adapted
        self._retains = retains
        self.ids: list[int] = []
        self.streams: list[Stream] = []
        self._pool = pool
        self._ahead = ahead
        self._tokens: list[list[int]] = []
        self._tables: list[list[int]] = []
        self._offsets: list[int] = []  # position of the token that decode step n computes, less n
        self._sampling: list[SamplingParams] = []
        self._due: list[int] = []  # decode step with which each reaches its limit
        self._stopping = 0  # how many may end at any token
        self._at: dict[int, int] = {}

    def add(self, stream: Stream) -> None:
        """``stream``, whose table is named as far as it is computed, decodes from the next step on."""
        seq = stream.seq
        self._at[seq.request_id] = len(self.ids)
        self.ids.append(seq.request_id)
        self.streams.append(stream)
        self._tokens.append(stream.tokens)
        self._tables.append(seq.table)
        self._offsets.append(seq.computed - seq.entry_clock - 1)
        self._sampling.append(stream.sampling)
        self._due.append(seq.entry_clock + stream.limit - seq.generated)
        self._stopping += bool(stream.stop_tokens)

    def remove(self, request_id: int) -> None:
        """The stream decodes no more; one that does not is ignored."""
        at = self._at.pop(request_id, None)
        if at is None:
            return
        self._stopping -= bool(self.streams[at].stop_tokens)
        for column in (self.ids, self.streams, self._tokens, self._tables, self._offsets, self._sampling, self._due):
            last = column.pop()
            if at < len(column):
                column[at] = last
        if at < len(self.ids):
            self._at[self.ids[at]] = at

    def drop_drained(self) -> None:
        """Let go of sequences that stopped decoding at their limit before their last token is known."""
        for stream in [stream for stream in self.streams if stream.seq.state != DECODING]:
            self.remove(stream.seq.request_id)

    def due(self, clock: int) -> list[Stream]:
        """The streams that may end with decode step ``clock``: at their limit, or with a token that stops them."""
        return [stream for stream, due in zip(self.streams, self._due) if due <= clock or (self._stopping and stream.stop_tokens)]

    def entries(self, plan: BatchPlan) -> list[SequenceInput]:
        """The decodes of ``plan``; names the blocks that they begin."""
        clock = plan.clock
        starts = [offset + clock for offset in self._offsets]
        width = self._pool.block_tokens
        for at in [at for at, start in enumerate(starts) if not start % width]:
            self._pool.name_blocks(self.streams[at].seq, starts[at] + 1)
        last = repeat((LAST_SAMPLED,)) if self._ahead else zip([tokens[-1] for tokens in self._tokens])
        dropped = [stream.seq.dropped * width for stream in self.streams] if self._retains else repeat(0)
        adapters = [stream.adapter for stream in self.streams] if self._adapted else repeat(-1)
        rows = zip(self.ids, last, starts, self._tables, repeat(1), self._sampling, dropped, repeat(None), adapters)
        return list(map(tuple.__new__, repeat(SequenceInput), rows))


def chunk_entries(plan: BatchPlan, streams: dict[int, Stream], pool: KVPool) -> list[SequenceInput]:
    """The prefill chunks of ``plan``; names the blocks they fill."""
    completing = set(map(id, plan.completing)) if len(plan.completing) > 1 else {id(seq) for seq in plan.completing}
    entries = []
    for seq, (new, before) in zip(plan.prefills, plan.chunks):
        stream = streams[seq.request_id]
        dropped = seq.dropped * pool.block_tokens
        start = before + dropped
        table = pool.name_blocks(seq, start + new)
        rows = int(id(seq) in completing)
        entries.append(SequenceInput(seq.request_id, stream.tokens[start : start + new], start, table, rows, stream.sampling, dropped, None, stream.adapter))
    return entries
