"""Prefill first: while prompts can be computed, steps hold nothing else; decodes wait."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from serving.policies.batching.chunked_prefill import ChunkedPrefill
from serving.policies.moves import admit_urgent, admit_waiting, continue_decodes, continue_prefills, evict_for_urgent

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class PrefillFirst:
    """Best time to first token, at the price of stalls between tokens. Options as in ``chunked_prefill``."""

    def __init__(self, *, head_of_line: str = "block", max_bypasses: int = 16) -> None:
        options = ChunkedPrefill(head_of_line=head_of_line, max_bypasses=max_bypasses)
        self.head_of_line = options.head_of_line
        self.max_bypasses = options.max_bypasses

    def plan(self, batch: PlanBuilder) -> None:
        """Fill one step with prefills, or with decodes when no prefill can run."""
        urgent, change_s = 0, inf
        if batch.evicts and batch.waiting:
            urgent, change_s = evict_for_urgent(batch, beside_decodes=False)
        if urgent:
            admit_urgent(batch, urgent)
        fits = True
        if batch.partials and not (batch.decodes and batch.pool.free == 0):
            fits = continue_prefills(batch)
        if batch.waiting and fits:
            open_s = batch.window.open_s(batch)
            if open_s <= batch.now_s:
                admit_waiting(batch, self.head_of_line, self.max_bypasses)
            else:
                change_s = min(change_s, open_s)
                batch.ask_again(open_s)
        if not batch.plan.chunks:
            continue_decodes(batch)
        batch.valid_until(change_s)
