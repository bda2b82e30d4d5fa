"""Prefill and decode side by side: every step runs its decodes on one stream of the GPU and its prompts on another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError
from serving.policies.batching.chunked_prefill import ChunkedPrefill

if TYPE_CHECKING:
    from serving.builder import PlanBuilder


class TwoStreams:
    """As ``chunked_prefill``, but the two parts of a step are separate kernels that overlap, bandwidth beside compute.

    ``prefill_tokens`` bounds the prompt tokens beside decodes: a step ends when both streams have, so a long chunk holds the next
    tokens back; null leaves them the whole budget. Without decodes the budget is the prompts' alone. Other options as in ``chunked_prefill``.
    """

    streams = 2  # an engine makes ready for as many

    def __init__(self, *, prefill_tokens: int | None = None, head_of_line: str = "block", max_bypasses: int = 16) -> None:
        if prefill_tokens is not None and prefill_tokens < 1:
            raise InputError("prefill_tokens", f"must be at least 1, got {prefill_tokens}")
        self.prefill_tokens = prefill_tokens
        self._mixed = ChunkedPrefill(head_of_line=head_of_line, max_bypasses=max_bypasses)

    def plan(self, batch: PlanBuilder) -> None:
        """Fill one step."""
        batch.plan.streams = self.streams
        self._mixed.plan(batch, prefill_tokens=self.prefill_tokens)
