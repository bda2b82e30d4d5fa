"""Decodes with draft tokens: propose, verify, keep what was accepted, give back the pages of the rest.

A step of k drafts computes k + 1 positions of every decoding sequence and yields between 1 and k + 1 tokens of each. How many
is known only at commit, and differs between sequences, so here they are walked one by one instead of as an aggregate: their
counters are exact at all times, and pages for all k + 1 positions are taken when the step is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.sequence import DECODING, Sequence

if TYPE_CHECKING:
    from serving.builder import PlanBuilder
    from serving.plan import BatchPlan
    from serving.scheduler import Scheduler


def continue_speculating(batch: PlanBuilder) -> int:
    """As ``PlanBuilder.continue_decodes``: with the drafts that the policy, the tokens and the pages allow, else without any."""
    scheduler, pool = batch.scheduler, batch.pool
    decoding = [seq for seq in batch.running if seq.state == DECODING]
    wanted = scheduler.policies.speculation.draft_tokens(len(decoding))
    drafts = max(0, min(wanted, batch.tokens_left // len(decoding) - 1))
    need = _pages(scheduler, decoding, drafts)
    if need > pool.free and drafts:
        drafts = 0
        need = _pages(scheduler, decoding, 0)
    if need > pool.free:
        return need - pool.free
    pool.take(need)
    width, plan = drafts + 1, batch.plan
    for seq in decoding:
        seq.computed += width
    scheduler.clock = plan.clock = scheduler.clock + 1
    scheduler.context += width * len(decoding)
    plan.decodes = len(decoding)
    plan.decode_context_tokens = scheduler.context
    plan.query_tokens_per_decode = width
    plan.speculating = decoding
    batch.tokens_left -= width * len(decoding)
    return 0


def _pages(scheduler: Scheduler, decoding: list[Sequence], drafts: int) -> int:
    blocks_for = scheduler.pool.blocks_for
    return sum(blocks_for(seq.computed + drafts + 1) - blocks_for(seq.computed) for seq in decoding)


def commit_accepted(scheduler: Scheduler, plan: BatchPlan, tokens: dict[Sequence, int]) -> None:
    """Take in how many tokens each sequence of the step got (at least 1): roll the others back and return their pages.

    Raises ValueError for a number that the step cannot have yielded.
    """
    width = plan.query_tokens_per_decode
    if width > 1:
        plan.accepted = [tokens.get(seq, 0) for seq in plan.speculating]
    for seq in plan.speculating:
        if seq.state != DECODING:
            continue  # aborted while in flight
        got = tokens[seq]
        if not 1 <= got <= width:
            raise ValueError(f"request {seq.request_id}: {got} tokens from a step of {width}")
        seq.generated += got
        if got < width:
            scheduler.context -= width - got
            scheduler.pool.roll_back(seq, seq.computed - (width - got))
