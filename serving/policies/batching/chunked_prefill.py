"""Chunked prefill: every step continues all decodes and fills the rest of its token budget with prefill chunks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from serving.errors import InputError, nearest
from serving.policies.moves import admit_urgent, admit_waiting, continue_decodes, continue_prefills, evict_for_urgent

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class ChunkedPrefill:
    """Decodes first, then prefills in progress, then admissions in queue order.

    ``head_of_line``: ``block`` waits when the head of the queue does not fit; ``skip`` lets others pass it, each head at most
    ``max_bypasses`` times.
    """

    def __init__(self, *, head_of_line: str = "block", max_bypasses: int = 16) -> None:
        if head_of_line not in ("block", "skip"):
            raise InputError("head_of_line", f"'{head_of_line}' is not a mode", nearest(head_of_line, ("block", "skip")))
        if max_bypasses < 0:
            raise InputError("max_bypasses", f"must not be negative, got {max_bypasses}")
        self.head_of_line = head_of_line
        self.max_bypasses = max_bypasses

    def plan(self, batch: PlanBuilder, *, admit: Callable[[PlanBuilder], None] | None = None, prefill_tokens: int | None = None) -> None:
        """Fill one step. Policies built on this one bring their own ``admit``, or bound the prompt tokens beside decodes."""
        urgent, change_s = 0, inf
        if batch.evicts and batch.waiting:
            urgent, change_s = evict_for_urgent(batch)
        short = False
        if batch.decodes and batch.continue_decodes():
            short = True
            continue_decodes(batch)
        if prefill_tokens is not None and batch.plan.decodes:
            batch.limit_tokens(prefill_tokens)
        if urgent:
            admit_urgent(batch, urgent)
        if batch.partials and not continue_prefills(batch):
            short = True
        if batch.waiting and not short:
            open_s = batch.window.open_s(batch)
            if open_s <= batch.now_s:
                if admit is None:
                    admit_waiting(batch, self.head_of_line, self.max_bypasses)
                else:
                    admit(batch)
            else:
                change_s = min(change_s, open_s)
                batch.ask_again(open_s)
        batch.valid_until(change_s)
