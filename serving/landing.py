"""Sequences that change replicas: pages set aside on one side, parked on the other until their KV has been copied."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from serving.request import Request
from serving.sequence import PARKED, Sequence

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class Landing:
    """The sequences of one scheduler that hold pages but no seat.

    ``parked`` counts them; ``arrived`` queues those whose KV is here and that wait for a seat.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.parked = 0
        self.arrived: deque[Sequence] = deque()

    def park(self, seq: Sequence) -> None:
        """``seq`` goes on elsewhere; it keeps its pages here until they are copied."""
        seq.state = PARKED
        self.parked += 1

    def reserve(self, request: Request, generated: int, now_s: float) -> Sequence | None:
        """Set pages aside for a request whose KV (of its prompt) will be copied here; None when they are not free now.

        What the prefix cache holds of the prompt is shared: ``computed - shared_blocks * block_tokens`` tokens remain to be copied.
        """
        scheduler, pool = self._scheduler, self._scheduler.pool
        keys = request.prefix_hashes if request.prefix_hashes and pool.prefix_caching else None
        need = pool.blocks_for(request.prompt_tokens)
        hit = pool.match(keys, request.prompt_tokens // pool.block_tokens) if keys is not None else None
        if need + (hit.idle_blocks - hit.blocks if hit is not None else 0) > pool.free:
            return None
        seq = scheduler.enter(request, keys, now_s)
        seq.generated = generated
        self.park(seq)
        if hit is not None and hit.blocks:
            pool.share(seq, hit)
        pool.take(need - seq.shared_blocks)
        seq.computed = request.prompt_tokens
        return seq

    def land(self, seq: Sequence) -> None:
        """The KV of reserved ``seq`` has arrived: it decodes as soon as there is a seat."""
        if seq.state != PARKED:
            return  # aborted meanwhile
        pool = self._scheduler.pool
        if seq.keys is not None:
            full = min(seq.computed // pool.block_tokens, len(seq.keys))
            if full > seq.shared_blocks:
                pool.publish(seq, seq.keys[seq.shared_blocks : full])
        self.arrived.append(seq)

    def next_arrived(self) -> Sequence | None:
        """Take the next sequence to seat; None when there is none."""
        while self.arrived:
            seq = self.arrived.popleft()
            if seq.state == PARKED:
                self.parked -= 1
                return seq
        return None

    def release(self, seq: Sequence, now_s: float) -> None:
        """The KV of parked ``seq`` has been copied out: its pages are free (their content stays cached) and it is gone from here."""
        if seq.state == PARKED:
            self.parked -= 1
            self._scheduler.pool.release(seq)
            self._scheduler.end(seq, now_s, "handed_over")
