"""Prefill and decode side by side: every step runs its decodes on one stream of the GPU and its prompts on another."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.policies.batching.chunked_prefill import ChunkedPrefill
from serving.policies.moves import admit_urgent, admit_waiting, continue_decodes, continue_prefills, evict_for_urgent

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class TwoStreams:
    """As ``chunked_prefill``, but the two parts of a step are separate kernels that overlap, bandwidth beside compute.

    ``prefill_tokens`` bounds the prompt tokens beside decodes: a step ends when both streams have, so a long chunk holds the next
    tokens back; null leaves them the whole budget. Without decodes the budget is the prompts' alone. Other options as in ``chunked_prefill``.
    """

    def __init__(self, *, prefill_tokens: int | None = None, head_of_line: str = "block", max_bypasses: int = 16) -> None:
        if prefill_tokens is not None and prefill_tokens < 1:
            raise InputError("prefill_tokens", f"must be at least 1, got {prefill_tokens}")
        options = ChunkedPrefill(head_of_line=head_of_line, max_bypasses=max_bypasses)
        self.prefill_tokens = prefill_tokens
        self.head_of_line, self.max_bypasses = options.head_of_line, options.max_bypasses

    def plan(self, batch: PlanBuilder) -> None:
        """Fill one step."""
        batch.plan.streams = 2
        urgent, change_s = 0, inf
        if batch.evicts and batch.waiting:
            urgent, change_s = evict_for_urgent(batch)
        short = False
        if batch.decodes and batch.continue_decodes():
            short = True
            continue_decodes(batch)
        if self.prefill_tokens is not None and batch.plan.decodes:
            batch.limit_tokens(self.prefill_tokens)
        if urgent:
            admit_urgent(batch, urgent)
        if batch.partials and not continue_prefills(batch):
            short = True
        if batch.waiting and not short:
            open_s = batch.window.open_s(batch)
            if open_s <= batch.now_s:
                admit_waiting(batch, self.head_of_line, self.max_bypasses)
            else:
                change_s = min(change_s, open_s)
                batch.ask_again(open_s)
        batch.valid_until(change_s)
