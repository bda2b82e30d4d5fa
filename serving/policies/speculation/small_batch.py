"""Speculate while the batch is small."""

from __future__ import annotations

from serving.errors import InputError


class SmallBatch:
    """Up to ``tokens`` drafts a decode, as long as all drafts of a step stay within ``budget_tokens``.

    Verifying is nearly free while a step is bound by reading the weights, and costs its full share of compute beyond that: a
    growing batch therefore needs fewer drafts, and a large one none.
    """

    def __init__(self, *, tokens: int = 4, budget_tokens: int = 64) -> None:
        if not 0 <= tokens <= 64 or budget_tokens < 0:
            raise InputError("tokens", f"needs 0 <= tokens <= 64 and a budget that is not negative, got {tokens} and {budget_tokens}")
        self.tokens = tokens
        self.budget_tokens = budget_tokens

    def draft_tokens(self, decodes: int) -> int:
        """What the budget leaves each decode."""
        return min(self.tokens, self.budget_tokens // decodes) if decodes else 0
