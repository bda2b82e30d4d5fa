"""A step between its launch and its commit: who gets a token from it, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from engine.step import SequenceInput, StepInput, StepOutput
from engine.streams import Stream
from serving.plan import BatchPlan, StepResult
from serving.sequence import DECODING, ENDED, Sequence

Finished = list[tuple[Sequence, str]]


class Decoding(Protocol):
    """The streams that decode: ``engine.streams.Decodes`` or ``engine.drafted.Drafted``."""

    @property
    def ids(self) -> list[int]:
        """The requests, in the order of ``entries``."""

    @property
    def streams(self) -> list[Stream]:
        """Their streams, likewise."""

    def add(self, stream: Stream) -> None:
        """``stream`` decodes from the next step on."""

    def remove(self, request_id: int) -> None:
        """The stream decodes no more; one that does not is ignored."""

    def drop_drained(self) -> None:
        """Let go of sequences that stopped decoding before their last token is known."""

    def due(self, clock: int) -> list[Stream]:
        """The streams that may end with decode step ``clock``."""

    def entries(self, plan: BatchPlan) -> list[SequenceInput]:
        """Their part of the step of ``plan``."""


class Flight:
    """A launched step: ``decodes`` and ``completing`` are the streams that get a token from it.

    ``tokens`` are, once taken, the tokens of each request that count: of a step that verified drafts, the accepted ones.
    """

    __slots__ = (
        "accepted", "batch", "completing", "decode_ids", "decodes", "drafts", "due", "entries", "events_before_commits", "launched", "plan",
        "prepare_s", "schedule_s", "tested", "tokens", "used_blocks",
    )  # fmt: skip

    def __init__(self, plan: BatchPlan, decodes: Decoding, entries: list[SequenceInput], completing: list[Stream]) -> None:
        """``entries`` are those of the decodes, in the order of ``decodes``."""
        self.plan = plan
        self.entries = entries
        self.decode_ids = list(decodes.ids) if plan.decodes else []
        self.decodes = list(decodes.streams) if plan.decodes else []
        self.due = decodes.due(plan.clock) if plan.decodes else []  # streams that may end with this step
        self.completing = completing
        self.batch: StepInput
        self.launched: object = None
        self.tokens: Mapping[int, tuple[int, ...]] = {}
        self.accepted: dict[Sequence, int] = {}
        self.drafts = self.tested = 0  # drafts verified, and those of them that followed accepted ones only
        self.used_blocks = 0
        self.events_before_commits: list[int] = []
        self.schedule_s = 0.0
        self.prepare_s = 0.0

    def take_tokens(self, output: StepOutput, end_s: float, *, ahead: bool) -> list[float]:
        """Append the step's tokens to their streams; returns the gaps to the tokens before. ``ahead``: another step was planned meanwhile."""
        self.tokens = tokens = output.tokens
        decodes, plan, rest, gaps_s = self.decodes, self.plan, self.completing, []
        if plan.query_tokens_per_decode > 1:
            gaps_s = self._take_accepted(output, end_s)
        elif output.errors or plan.withdrawn or (ahead and any(stream.seq.state != DECODING for stream in decodes)):
            rest = decodes + rest  # not all of them want a token, or get one
        else:
            gaps_s = [end_s - stream.token_s for stream in decodes]
            for stream, request_id in zip(decodes, self.decode_ids):
                stream.tokens.append(tokens[request_id][0])
                stream.token_s = end_s
        for stream in rest:
            produced = tokens.get(stream.request.request_id)
            if produced is not None and stream.seq.state != ENDED:
                if stream.token_s == stream.token_s:
                    gaps_s.append(end_s - stream.token_s)
                stream.tokens.append(produced[0])
                stream.token_s = end_s
        return gaps_s

    def _take_accepted(self, output: StepOutput, end_s: float) -> list[float]:
        """Of each decode the drafts that its network agreed with, and the token that it chose itself behind them."""
        told = self.tokens = dict(output.tokens)
        gaps_s: list[float] = []
        for stream, entry in zip(self.decodes, self.entries):
            produced = output.tokens.get(entry.request_id)
            if produced is None or stream.seq.state == ENDED:
                continue
            tokens = told[entry.request_id] = accepted(entry.tokens[1:], produced, stream.stop_tokens)
            self.accepted[stream.seq] = len(tokens)
            self.drafts += len(entry.tokens) - 1
            self.tested += min(len(entry.tokens) - 1, len(tokens))
            gaps_s += [end_s - stream.token_s, *[0.0] * (len(tokens) - 1)]
            stream.tokens += tokens
            stream.token_s = end_s
        return gaps_s

    def finished(self, streams: Mapping[int, Stream], output: StepOutput) -> Finished:
        """The sequences that end with the step, by id; ``streams`` are those that are here."""
        finished = []
        for request_id in output.errors:
            stream = streams.get(request_id)
            if stream is not None:
                stream.seq.keys = None  # nothing that it computed may be shared
                finished.append((stream.seq, "error"))
        for stream in [*self.due, *self.completing]:
            if stream.seq.state != ENDED and stream.request.request_id not in output.errors:
                reason = stream.end_reason()
                if reason is not None:
                    finished.append((stream.seq, reason))
        finished.sort(key=lambda pair: pair[0].request_id)
        return finished

    def result(self, output: StepOutput, end_s: float, finished: Finished) -> StepResult:
        """What the scheduler is told: where decodes are walked one by one, how many tokens each got and how its attention was spread."""
        walked = self.plan.speculating
        if not walked:
            return StepResult(end_s, finished)
        entropy = {seq: output.entropy.get(seq.request_id, 1.0) for seq in walked} if output.entropy else None
        return StepResult(end_s, finished, {seq: self.accepted.get(seq, 1) for seq in walked}, entropy)


def accepted(drafts: Seq[int], chosen: tuple[int, ...], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """The tokens that count: ``chosen`` as long as it repeats ``drafts``, and one more; nothing behind a token that stops."""
    count = 0
    while count < len(drafts) and chosen[count] == drafts[count] and chosen[count] not in stop_tokens:
        count += 1
    return chosen[: count + 1]
