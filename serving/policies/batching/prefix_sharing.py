"""Chunked prefill that admits together what shares a prefix: parents before children, the most shared blocks first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.builder import ADMITTED, ENDED_AT_WALL
from serving.errors import InputError
from serving.policies.batching.chunked_prefill import ChunkedPrefill

if TYPE_CHECKING:
    from serving.builder import PlanBuilder
    from serving.kv_pool import Hit
    from serving.sequence import Sequence


class PrefixSharing:
    """Waiting requests form a forest: one is a child of another whose prefix it continues. A request is *ready* unless the next block of
    its prefix is being computed for another one right now; it then waits to share that block instead of computing it again. Nor is one
    ready whose adapter finds no slot.

    Of the first ``look_ahead`` ready requests the one that shares most blocks with running sequences goes first, then most cached
    blocks, then the order of the queue. Nobody is passed more than ``max_bypasses`` times.
    """

    def __init__(self, *, look_ahead: int = 16, max_bypasses: int = 64) -> None:
        if look_ahead < 1 or max_bypasses < 0:
            raise InputError("look_ahead", f"look_ahead must be at least 1 and max_bypasses not negative, got {look_ahead} and {max_bypasses}")
        self.look_ahead = look_ahead
        self.max_bypasses = max_bypasses
        self._mixed = ChunkedPrefill()

    def plan(self, batch: PlanBuilder) -> None:
        """Fill one step: decodes, prefills in progress, then admissions."""
        self._mixed.plan(batch, admit=self._admit)

    def _admit(self, batch: PlanBuilder) -> None:
        while batch.waiting and batch.tokens_left > 0 and batch.seats_left > 0:
            passed = self._choose(batch)
            if passed is None:
                return
            got = batch.admit()
            if passed:
                batch.restore_bypassed()
            if got == ADMITTED:
                for seq in passed:
                    seq.bypasses += 1
            elif got != ENDED_AT_WALL:
                return

    def _choose(self, batch: PlanBuilder) -> list[Sequence] | None:
        """Bring the best ready request to the head; returns those set aside for it, or None when all had better wait."""
        looked: list[Sequence] = []
        best, best_score = -1, (-1, -1)
        while len(looked) < self.look_ahead:
            head = batch.head()
            if head is None or head in batch.plan.preempted:
                break
            hit = self._hit(batch, head)
            slotless = batch.adapters is not None and not batch.adapters.room_for((head.request.adapter,))
            bound = min(self.max_bypasses, batch.adapters.max_bypasses) if slotless else self.max_bypasses
            overdue = not looked and head.bypasses >= bound
            if overdue or not (slotless or self._is_being_computed(batch, head, hit)):
                score = (hit.blocks - hit.idle_blocks, hit.blocks) if hit is not None else (0, 0)
                if score > best_score:
                    best, best_score = len(looked), score
            if overdue:
                break
            looked.append(head)
            batch.bypass()
        batch.restore_bypassed()
        if best < 0:
            if not looked or not batch.plan.empty:
                return None
            best = 0
        for _ in range(best):
            batch.bypass()
        return looked[:best]

    @staticmethod
    def _hit(batch: PlanBuilder, seq: Sequence) -> Hit | None:
        if seq.keys is None:
            return None
        return batch.pool.match(seq.keys, (seq.known_tokens - 1) // batch.pool.block_tokens)

    @staticmethod
    def _is_being_computed(batch: PlanBuilder, seq: Sequence, hit: Hit | None) -> bool:
        if hit is None or hit.blocks >= len(seq.keys) or (hit.blocks + 1) * batch.pool.block_tokens >= seq.known_tokens:
            return False
        place, key = hit.blocks, seq.keys[hit.blocks]
        for other in (*batch.partials, *batch.plan.prefills):
            keys = other.keys
            if keys is not None and place < len(keys) and keys[place] == key and keys[:place] == seq.keys[:place]:
                return True
        return False
