"""The only place in the simulator that knows how many tokens a request will generate."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from serving.plan import BatchPlan
from serving.sequence import DECODING, ENDED, PREFILLING, WAITING, Sequence

if TYPE_CHECKING:
    import numpy as np

NEVER = 1 << 60


class Oracle:
    """Tells which sequences end with a step. A decoding sequence ends at a decode clock known when its prefill completes."""

    def __init__(self, acceptance: float = 0.0, rng: np.random.Generator | None = None) -> None:
        """``acceptance`` is the probability that a draft token is accepted; ``rng`` draws, where drafts are made, or reads what a run recorded."""
        self._acceptance = acceptance
        self._rng = rng
        self._output_tokens: dict[int, int] = {}
        self._due: list[tuple[int, int, int, Sequence]] = []  # (decode clock, request id, preemptions, sequence)

    def expect(self, request_id: int, output_tokens: int) -> None:
        """Note the true output length of a request, at least 1."""
        self._output_tokens[request_id] = output_tokens

    def forget(self, request_id: int) -> None:
        """A request left without ending here (aborted, refused, out of room)."""
        self._output_tokens.pop(request_id, None)

    def output_tokens(self, request_id: int) -> int:
        """True output length of a request that is here; 0 when nobody has told it (yet, or any more)."""
        return self._output_tokens.get(request_id, 0)

    def joined(self, seq: Sequence) -> None:
        """``seq`` decodes from the step being planned on, with KV that came from elsewhere (unless that same plan has evicted it)."""
        if seq.state != DECODING:
            return
        rest = self._output_tokens[seq.request_id] - seq.generated
        heappush(self._due, (seq.entry_clock + rest, seq.request_id, seq.preemptions, seq))

    def accepted(self, plan: BatchPlan) -> dict[Sequence, int]:
        """Tokens that each decode of a speculating plan gets: drafts are accepted one after the other, each with the same
        probability, until one is not; the token that replaces it, or follows the last, comes on top.
        """
        drafts = plan.query_tokens_per_decode - 1
        draws = self._rng.geometric(1 - self._acceptance, len(plan.speculating)) if drafts and self._acceptance < 1 else None
        tokens = {}
        for position, seq in enumerate(plan.speculating):
            got = min(int(draws[position]), drafts + 1) if draws is not None else drafts + 1
            rest = self._output_tokens.get(seq.request_id, 1) - seq.generated
            tokens[seq] = max(1, min(got, rest))
        return tokens

    def finished_speculating(self, plan: BatchPlan, tokens: dict[Sequence, int]) -> list[tuple[Sequence, str]]:
        """As ``finished``, for a scheduler that speculates: ends follow from the tokens, not from the decode clock."""
        ended = []
        for seq, got in [*tokens.items(), *((seq, 0) for seq in plan.completing)]:
            if seq.state == DECODING and seq.generated + got >= self._output_tokens[seq.request_id]:
                capped = self._output_tokens.pop(seq.request_id) >= seq.request.max_output_tokens
                ended.append((seq, "length" if capped else "stop"))
        return sorted(ended, key=lambda pair: pair[0].request_id)

    def finished(self, plan: BatchPlan) -> list[tuple[Sequence, str]]:
        """Sequences that end with the last step of ``plan``, by (clock, request id), each with its reason."""
        clock, due = plan.clock, self._due
        for seq in plan.completing:
            if seq.state == ENDED:
                continue
            rest = self._output_tokens[seq.request_id] - seq.generated
            if seq.state == DECODING:
                heappush(due, (seq.entry_clock + rest, seq.request_id, seq.preemptions, seq))
            elif rest <= 0:  # preempted or drained by a later plan, and this token was its last
                heappush(due, (clock, seq.request_id, seq.preemptions, seq))
        if not due or due[0][0] > clock:
            return []
        finished = []
        while due and due[0][0] <= clock:
            _, request_id, preemptions, seq = heappop(due)
            if seq.preemptions != preemptions:  # stale, unless a plan made before this result was known evicted it
                ends = seq.state == WAITING and self._output_tokens.get(request_id, NEVER) <= seq.generated
            else:
                ends = seq.state not in (PREFILLING, ENDED)
            if ends:
                capped = self._output_tokens.pop(request_id) >= seq.request.max_output_tokens
                finished.append((seq, "length" if capped else "stop"))
        return finished

    def steps_to_next_finish(self, clock: int) -> int:
        """Decode steps after ``clock`` until some sequence ends (an entry gone stale may make it too small, never too large)."""
        due = self._due
        while due and (due[0][3].preemptions != due[0][2] or due[0][3].state == ENDED):
            heappop(due)
        return due[0][0] - clock if due else NEVER
