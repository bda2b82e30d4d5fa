"""Read back what is cheaper to read than to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InputError

if TYPE_CHECKING:
    from serving.scheduler import Scheduler


class Cheaper:
    """Compares the time to read the pages with ``tokens`` times what a prompt token has cost of late in this replica's own steps.

    ``bias`` above 1 asks for a clear advantage of reading. Until a step has been seen everything is read.
    """

    def __init__(self, *, bias: float = 1.0) -> None:
        if not bias > 0:
            raise InputError("bias", f"must be positive, got {bias}")
        self.bias = bias

    def load(self, tokens: int, load_s: float, queue: Scheduler) -> bool:
        """Whether reading is the cheaper."""
        per_token_s = queue.prefill_token_s
        return per_token_s != per_token_s or load_s * self.bias < tokens * per_token_s
