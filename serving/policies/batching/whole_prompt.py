"""Whole prompts beside decodes: a step continues all decodes and takes in prompts uncut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.policies.batching.chunked_prefill import ChunkedPrefill

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class WholePrompt:
    """The token budget counts prompt tokens only and a prompt is never cut, unless it alone exceeds the budget."""

    def __init__(self, *, head_of_line: str = "block", max_bypasses: int = 16) -> None:
        self._mixed = ChunkedPrefill(head_of_line=head_of_line, max_bypasses=max_bypasses)

    def plan(self, batch: PlanBuilder) -> None:
        """Fill one step."""
        batch.whole_prompts = True
        self._mixed.plan(batch)
