"""The moves that batching policies are composed of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from serving.builder import ADMITTED, ENDED_AT_WALL, NO_BLOCKS, NO_SLOT
from serving.sequence import DECODING, Sequence

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


def evict_for_urgent(batch: PlanBuilder, *, beside_decodes: bool = True) -> tuple[int, float]:
    """Make room for the most urgent waiting requests where the ordering policy allows it; ``admit_urgent`` then takes them in.

    Nobody is evicted unless the newcomer then fits into this very step, ``beside_decodes`` or in their stead. Returns how many
    requests at the head of the queue have room, and the time from which the next one may evict, if it may not yet.
    """
    open_s = batch.window.open_s(batch)
    if open_s > batch.now_s:
        return 0, open_s
    urgent, blocks, from_s = 0, 0, math.inf
    adapters: list[str] = []
    tokens = batch.tokens_left - batch.decodes if beside_decodes and not batch.whole_prompts else batch.tokens_left
    while tokens > 0:
        head = batch.head()
        if head is None or head in batch.plan.preempted:
            break
        from_s = batch.evicts_from_s(head.request)
        if from_s > batch.now_s or batch.running.least_urgent(head.request.priority) is None:
            break
        need_blocks, need_tokens = batch.needs(head)
        if batch.whole_prompts and urgent and need_tokens > tokens:
            break
        adapters.append(head.request.adapter)
        if batch.adapters is not None and not batch.adapters.room_for(adapters):
            break
        blocks += need_blocks
        if not _evict_for(batch, head, urgent + 1, blocks, beside_decodes):
            break
        urgent += 1
        tokens -= min(need_tokens, tokens, batch.max_chunk_tokens)
        batch.bypass()
    batch.restore_bypassed()
    return urgent, from_s if from_s > batch.now_s else math.inf


def _evict_for(batch: PlanBuilder, head: Sequence, seats: int, blocks: int, beside_decodes: bool) -> bool:
    """Evict until ``seats`` and ``blocks`` are free; returns False, and evicts nobody, when no choice of victims yields that.

    What cannot be had now cannot be had after further decode steps either (those who could yield take blocks that were free,
    the others only make it worse), so a plan that evicts nobody stands until something happens.
    """
    running = batch.running

    def room() -> int:
        return batch.pool.free - (batch.decode_blocks if beside_decodes else 0)

    if batch.seats_left >= seats and room() >= blocks:
        return True
    less_urgent = list(running.less_urgent(head.request.priority))
    yielded = sum(batch.scheduler.held_blocks(seq) for seq in less_urgent)
    if beside_decodes:
        yielded += sum(seq.state == DECODING and running.computed(seq) % batch.pool.block_tokens == 0 for seq in less_urgent)
    if batch.seats_left + len(less_urgent) < seats or room() + yielded < blocks:
        return False
    while batch.seats_left < seats or room() < blocks:
        victim = batch.victim.choose(running, head)
        if victim is None:
            return False
        batch.preempt(victim)
    return True


def admit_urgent(batch: PlanBuilder, count: int) -> None:
    """Admit the ``count`` requests for which there is room, ahead of prefills in progress."""
    for _ in range(count):
        if batch.admit() != ADMITTED:
            break


def continue_decodes(batch: PlanBuilder) -> None:
    """Continue every decoding sequence, preempting until the blocks suffice."""
    while batch.continue_decodes():
        batch.preempt(batch.victim.choose(batch.running, None))


def continue_prefills(batch: PlanBuilder) -> bool:
    """Give each partial prefill its next chunk. Returns False when blocks ran short: then nobody should be admitted.

    A partial that finds no blocks waits for the decodes to free some. Only where nothing else can run is somebody evicted:
    work that this plan already holds is never taken back.
    """
    for seq in list(batch.partials):
        if seq in batch.plan.admitted:
            continue  # urgent, and it has its chunk
        taken = batch.add_chunk(seq)
        if taken < 0:
            while taken < 0 and batch.plan.empty:
                victim = batch.victim.choose(batch.running, None)
                batch.preempt(victim)
                if victim is seq:
                    break
                taken = batch.add_chunk(seq)
            return False  # whoever gave way may be one of the partials still to come
        if not batch.tokens_left:
            break
    return True


def admit_waiting(batch: PlanBuilder, head_of_line: str, max_bypasses: int) -> None:
    """Admit from the head of the queue. ``skip`` passes a head that lacks blocks, at most ``max_bypasses`` times each.

    A head that waits for an adapter slot is passed either way, within the bound of the slots.
    """
    passed: list[tuple[Sequence, int]] = []  # with the bound that holds for each
    while batch.waiting and batch.tokens_left > 0:
        head = batch.head()
        if head is None or head in batch.plan.preempted:
            break
        got = batch.admit()
        if got in (ADMITTED, ENDED_AT_WALL):
            if passed and got == ADMITTED:
                for seq, _ in passed:
                    seq.bypasses += 1
                if any(seq.bypasses >= bound for seq, bound in passed):
                    break
            continue
        bound = batch.adapters.max_bypasses if got == NO_SLOT else max_bypasses
        if not (got == NO_SLOT or (got == NO_BLOCKS and head_of_line == "skip")) or head.bypasses >= bound:
            break
        passed.append((head, bound))
        batch.bypass()
