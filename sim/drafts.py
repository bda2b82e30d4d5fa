"""What speculation cost and brought, and from how many tokens a step on it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from serving.plan import BatchPlan, StepShape
from serving.sequence import Sequence


class DraftAccount:
    """Sums over the speculating steps of one replica."""

    def __init__(self) -> None:
        self.steps = 0
        self.decodes = 0
        self.drafts = 0
        self.tokens = 0
        self.step_s = 0.0
        self.plain_s = 0.0

    def note(self, plan: BatchPlan, duration_s: float, tokens: dict[Sequence, int], price: Callable[[StepShape], float]) -> int:
        """Add a speculating step; returns how many of its tokens came together with another (no time passed between them)."""
        got = sum(tokens.values())
        plain = StepShape(tuple(plan.chunks), plan.decodes, plan.decode_context_tokens, plan.decodes + len(plan.completing))
        self.add(len(tokens), plan.query_tokens_per_decode - 1, got, duration_s, price(plain))
        return got - len(tokens)

    def add(self, decodes: int, drafts: int, tokens: int, step_s: float, plain_s: float) -> None:
        """One step of ``decodes`` sequences with ``drafts`` each that yielded ``tokens``; ``plain_s`` is its price without drafts."""
        self.steps += 1
        self.decodes += decodes
        self.drafts += decodes * drafts
        self.tokens += tokens
        self.step_s += step_s
        self.plain_s += plain_s


def draft_report(accounts: Iterable[DraftAccount]) -> dict[str, Any]:
    """The ``speculation`` part of summary.json.

    ``acceptance_length`` is the tokens that a decode yields in a step; ``step_cost_ratio`` the step's time over that of a plain
    step, draft included. A plain step yields one token, so speculation pays exactly where the length exceeds the ratio: the
    ratio *is* the break-even length.
    """
    total = DraftAccount()
    for account in accounts:
        for name, value in vars(account).items():
            setattr(total, name, getattr(total, name) + value)
    if not total.decodes:
        return {"steps": 0, "draft_tokens": None, "acceptance_length": None, "step_cost_ratio": None, "break_even_acceptance_length": None, "speedup": None}
    length, ratio = total.tokens / total.decodes, total.step_s / total.plain_s
    return {
        "steps": total.steps,
        "draft_tokens": total.drafts / total.decodes,
        "acceptance_length": length,
        "step_cost_ratio": ratio,
        "break_even_acceptance_length": ratio,
        "speedup": length / ratio,
    }
