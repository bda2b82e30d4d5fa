"""Sequences that give pages back while they run: what the retention policy drops leaves the pool's books and the attention's bill.

After each step the sequences in it are asked, one by one; their counters are exact at all times because decodes are walked
as they are with speculation (of no drafts, where there is none). ``computed`` goes on counting positions; the pages held are
``ceil(computed / block_tokens) - dropped``. The page being written is never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from serving.sequence import DECODING, PREFILLING, Sequence

if TYPE_CHECKING:
    from serving.kv_pool import KVPool
    from serving.plan import BatchPlan, StepResult
    from serving.policies.protocols import Retention
    from serving.scheduler import Scheduler


def attended(seq: Sequence, block_tokens: int) -> int:
    """KV entries of ``seq`` that are still held (settled value)."""
    return seq.computed - seq.dropped * block_tokens


def lasting_blocks(policy: Retention | None, pool: KVPool, tokens: int, chunk_tokens: int) -> int:
    """Pages that a sequence of ``tokens`` holds at once while it is computed in chunks of at most ``chunk_tokens``."""
    blocks = pool.blocks_for(tokens)
    if policy is None or policy.most_blocks is None:
        return blocks
    return min(blocks, policy.most_blocks + pool.blocks_for(chunk_tokens) + 1)


def retain(scheduler: Scheduler, plan: BatchPlan, result: StepResult) -> None:
    """Ask the policy about every sequence that the step has computed."""
    policy, entropy = scheduler.policies.retention, result.entropy
    for seq in plan.speculating:
        if seq.state == DECODING:
            if entropy is not None and policy.entropy_below:
                seq.calm_steps = seq.calm_steps + 1 if entropy[seq] < policy.entropy_below else 0
            _ask(scheduler, policy, seq, result.heat)
    for seq in plan.prefills:
        if seq.state in (PREFILLING, DECODING):
            _ask(scheduler, policy, seq, result.heat)


def _ask(scheduler: Scheduler, policy: Retention, seq: Sequence, heat: Mapping[Sequence, list[float]] | None) -> None:
    pool = scheduler.pool
    held = pool.blocks_for(seq.computed) - seq.dropped
    positions = policy.drop(held, seq.calm_steps, heat.get(seq) if heat is not None else None)
    if not positions:
        return
    if positions[0] < 0 or positions[-1] >= held - 1:
        raise ValueError(f"retention policy {type(policy).__name__} drops page {positions[-1]} of {held}: the last one is being written")
    pool.drop(seq, positions)
    scheduler.dropped_blocks += len(positions)
    if seq.state == DECODING:
        scheduler.context -= len(positions) * pool.block_tokens
