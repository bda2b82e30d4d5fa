"""What proposes draft tokens, by name: ``prompt_lookup``, ``network`` (a smaller one), ``layers`` (the first of the network's own), or ``module:Class``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Ask(NamedTuple):
    """A decoding request that wants at most ``count`` drafts. ``tokens`` are all that it has: the KV of the last one is not in the cache yet.

    ``table`` lists its blocks in order; they cover the positions of ``tokens`` and of ``count`` drafts.
    """

    request_id: int
    tokens: list[int]
    count: int
    table: list[int]
    sampling: SamplingParams


class Draft(NamedTuple):
    """Proposed tokens. ``probabilities`` [tokens, vocab] are those that each was drawn from; None: nothing was drawn, they are certain."""

    tokens: Sequence[int]
    probabilities: Tensor | None = None


NOTHING = Draft(())


class Proposer(Protocol):
    """Guesses what comes next. Whatever it says, the text stays what the network makes of it; only speed is at stake."""

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        """The drafts of each ask, at most as many as it wants."""

    def release(self, request_id: int) -> None:
        """The request decodes no more, or gives its blocks up; ids that were never asked for are ignored."""
