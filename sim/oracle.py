"""The only place in the simulator that knows how many tokens a request will generate."""

from __future__ import annotations

from heapq import heappop, heappush

from serving.plan import BatchPlan
from serving.sequence import DECODING, ENDED, PREFILLING, WAITING, Sequence

NEVER = 1 << 60


class Oracle:
    """Tells which sequences end with a step. A decoding sequence ends at a decode clock known when its prefill completes."""

    def __init__(self) -> None:
        self._output_tokens: dict[int, int] = {}
        self._due: list[tuple[int, int, int, Sequence]] = []  # (decode clock, request id, preemptions, sequence)

    def expect(self, request_id: int, output_tokens: int) -> None:
        """Note the true output length of a request, at least 1."""
        self._output_tokens[request_id] = output_tokens

    def forget(self, request_id: int) -> None:
        """A request left without ending here (aborted, refused, out of room)."""
        self._output_tokens.pop(request_id, None)

    def output_tokens(self, request_id: int) -> int:
        """True output length of a request that is here."""
        return self._output_tokens[request_id]

    def joined(self, seq: Sequence) -> None:
        """``seq`` decodes from the step being planned on, with KV that came from elsewhere."""
        rest = self._output_tokens[seq.request_id] - seq.generated
        heappush(self._due, (seq.entry_clock + rest, seq.request_id, seq.preemptions, seq))

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
