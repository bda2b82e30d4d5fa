"""Whether a scheduler's aggregates, queues and pool agree with its sequences; for tests, audits and idle engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.sequence import DECODING, PARKED, PREFILLING, WAITING

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError unless everything that is counted has its owner. Changes nothing."""
    live, running = scheduler.live(), list(scheduler.running)
    decoding = [(seq, scheduler.computed_at(seq, scheduler.clock)) for seq in running if seq.state == DECODING]
    assert len(decoding) == scheduler.decoding
    width = scheduler.pool.block_tokens
    assert scheduler.context == sum(computed - seq.dropped * width for seq, computed in decoding)
    phases = [0] * width
    for _, computed in () if scheduler.speculates else decoding:
        phases[(scheduler.clock - computed) % width] += 1
    assert phases == scheduler.phases
    assert sorted(id(seq) for seq in scheduler.partials) == sorted(id(seq) for seq in running if seq.state == PREFILLING)
    assert scheduler.waiting_count == sum(seq.state == WAITING for seq in live)
    parked = [seq for seq in live if seq.state == PARKED]
    assert len(parked) == scheduler.landing.parked
    assert len(live) == scheduler.waiting_count + len(running) + len(parked)
    scheduler.pool.check((seq, scheduler.running.computed(seq)) for seq in [*running, *parked])
    if scheduler.policies.adapters is not None:
        scheduler.policies.adapters.check(seq.request.adapter for seq in running)
