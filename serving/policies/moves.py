"""The moves that batching policies are composed of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from serving.builder import ADMITTED, ENDED_AT_WALL, NO_BLOCKS

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


def evict_for_urgent(batch: PlanBuilder) -> float:
    """Make room for the most urgent waiting requests where the ordering policy allows it.

    Nobody is evicted unless the newcomer then fits. Returns the time from which the head may evict, if it may not yet.
    """
    head = batch.head()
    if head is None or not batch.running:
        return math.inf
    from_s = batch.evicts_from_s(head.request)
    if from_s > batch.now_s:
        return from_s
    heads, blocks = [], 0
    while head is not None and batch.evicts_from_s(head.request) <= batch.now_s:
        if batch.running.least_urgent(head.request.priority) is None:
            break
        blocks += batch.blocks_needed(head)
        if not _evict_for(batch, head, seats=len(heads) + 1, blocks=blocks):
            break
        heads.append(head)
        batch.bypass()
        head = batch.head()
    batch.restore_bypassed()
    return math.inf


def _evict_for(batch: PlanBuilder, head, seats: int, blocks: int) -> bool:
    """Evict until ``seats`` and ``blocks`` are free; returns False, and evicts nobody, when no choice of victims yields that."""
    pool, running = batch.pool, batch.running
    if batch.seats_left >= seats and pool.free >= blocks:
        return True
    less_urgent = list(running.less_urgent(head.request.priority))
    yielded = sum(batch.scheduler.held_blocks(seq) for seq in less_urgent)
    if batch.seats_left + len(less_urgent) < seats or pool.free + yielded < blocks:
        return False
    while batch.seats_left < seats or pool.free < blocks:
        victim = batch.victim.choose(running, head)
        if victim is None:
            return False
        batch.preempt(victim)
    return True


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
        taken = batch.add_chunk(seq)
        while taken < 0 and batch.plan.empty:
            victim = batch.victim.choose(batch.running, None)
            batch.preempt(victim)
            if victim is seq:
                break
            taken = batch.add_chunk(seq)
        if taken < 0:
            return False
        if not batch.tokens_left:
            break
    return True


def admit_waiting(batch: PlanBuilder, head_of_line: str, max_bypasses: int) -> None:
    """Admit from the head of the queue. ``skip`` passes a head that lacks blocks, at most ``max_bypasses`` times each."""
    passed = []
    while batch.waiting and batch.tokens_left > 0:
        head = batch.head()
        if head is None or head in batch.plan.preempted:
            break
        got = batch.admit()
        if got in (ADMITTED, ENDED_AT_WALL):
            if passed and got == ADMITTED:
                for seq in passed:
                    seq.bypasses += 1
            continue
        if got != NO_BLOCKS or head_of_line == "block" or head.bypasses >= max_bypasses:
            break
        passed.append(head)
        batch.bypass()
