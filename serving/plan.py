"""What one step does: the shape a latency model prices, the plan an executor runs, the result it commits."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from serving.scheduler import Scheduler
    from serving.sequence import Sequence


class StepShape(NamedTuple):
    """The quantities that decide what a step costs. ``BatchPlan`` has the same attributes, so either can be priced.

    ``chunks`` lists the prefill chunks as (new tokens, tokens already in the KV cache before them).
    ``decode_context_tokens`` sums, over the decoding sequences, the KV entries each attends to (the new one included).
    ``logits_rows`` counts the rows the LM head computes: decodes plus prompts that finish in this step.
    ``adapters`` counts the distinct adapters that its sequences use, ``adapter_loads`` those that must be loaded first.
    With 2 ``streams`` the decodes and the prefill chunks are separate kernels that run side by side.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_context_tokens: int = 0
    logits_rows: int = 0
    query_tokens_per_decode: int = 1
    adapters: int = 0
    adapter_loads: int = 0
    streams: int = 1


class BatchPlan:
    """The work of one step, as the aggregate that prices it plus the sequences that change.

    ``chunks`` and ``prefills`` run in parallel: ``prefills[i]`` computes ``chunks[i] = (new tokens, context before)``.
    ``completing`` are the prefills that reach the end of what is known and so sample a token. ``decodes`` sequences produce
    one token each; ``decoding()`` names them. ``ended`` hit the wall of the pool and were closed while planning.
    ``clock`` counts the replica's decode steps, this one included.
    """

    # Most plans change little, and one is made for every step: what does not change is the class's, lists are made when a first
    # member comes.
    chunks: Seq[tuple[int, int]] = ()
    prefills: Seq[Sequence] = ()
    completing: Seq[Sequence] = ()
    admitted: Seq[Sequence] = ()
    landed: Seq[Sequence] = ()  # their KV came from another replica; they decode from this step on
    loads: Seq[int] = ()  # pages read back from each lower KV tier before the step's attention can run
    reloads: Seq[tuple[Sequence, int, tuple]] = ()  # what is read back: (sequence, position of the first page in its table, keys)
    speculating: Seq[Sequence] = ()  # the decoding sequences, where each also verifies ``query_tokens_per_decode - 1`` drafts
    accepted: Seq[int] = ()  # once committed, where it verified drafts: the tokens that each of ``speculating`` got
    preempted: Seq[Sequence] = ()
    ended: Seq[Sequence] = ()
    departed: Seq[Sequence] = ()  # decode in it, but were preempted or reached their cap while it was in flight
    withdrawn = 0  # decodes of sequences that were aborted meanwhile: nobody gets their (last) token
    decodes = 0
    decode_context_tokens = 0
    query_tokens_per_decode = 1
    logits_rows = 0
    adapters = 0
    adapter_loads = 0
    streams = 1
    steps = 1  # successive decode steps that this plan stands for, once extended
    valid_until_s = -math.inf  # the same decision holds for steps that start before this, barring an event
    ask_again_s = -math.inf  # an empty plan with work queued says when to ask again

    def __init__(self, scheduler: Scheduler, step: int, now_s: float, clock: int) -> None:
        self.scheduler = scheduler
        self.step = step
        self.now_s = now_s
        self.clock = clock

    @property
    def empty(self) -> bool:
        """Whether there is nothing to execute."""
        return not self.decodes and not self.chunks

    def shape(self) -> StepShape:
        """The frozen shape of this step."""
        return StepShape(
            tuple(self.chunks), self.decodes, self.decode_context_tokens, self.logits_rows, self.query_tokens_per_decode,
            self.adapters, self.adapter_loads, self.streams,
        )  # fmt: skip

    def decoding(self) -> list[Sequence]:
        """The sequences that decode in this step, in admission order; ask before the next plan is made."""
        return self.scheduler.decoding_in(self)

    def decode_contexts(self) -> list[int]:
        """KV entries that each decoding sequence attends to in this step (the new one included), in admission order."""
        return [self.scheduler.computed_at(seq, self.clock) for seq in self.decoding()]


class StepResult(NamedTuple):
    """What came of a plan: when it ended and which sequences ended with it, each with its reason."""

    end_s: float
    finished: list[tuple[Sequence, str]] = []  # noqa: RUF012 - never mutated; the common case is the shared empty list
    tokens: dict[Sequence, int] | None = None  # of a speculating plan: tokens that each of its decodes got
    entropy: dict[Sequence, float] | None = None  # mean attention entropy of its decodes over its maximum, where it is measured
    heat: dict[Sequence, list[float]] | None = None  # attention that each page of a sequence got, in the order of its table


class Outcome(NamedTuple):
    """What a policy's ``observe`` is told of a request that left the replica."""

    class_name: str
    priority: int
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    status: str
    ttft_slo_s: float = math.inf
