"""The streams that decode where each step verifies drafts: walked one by one, as the scheduler walks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.drafting import NOTHING, Ask, Proposer
from engine.step import SequenceInput
from engine.streams import Stream
from serving.kv_pool import KVPool
from serving.plan import BatchPlan

if TYPE_CHECKING:
    from torch import Tensor


class Drafted:
    """As ``engine.streams.Decodes``. The plan says how many drafts a decode may have; the proposer, which.

    Fewer are computed than planned where the proposer has none, and where the answer would be longer than it may be.
    """

    def __init__(self, pool: KVPool, proposer: Proposer) -> None:
        self._pool = pool
        self._proposer = proposer
        self._here: dict[int, Stream] = {}

    @property
    def ids(self) -> list[int]:
        """The requests, in the order of the latest plan, newcomers last."""
        return list(self._here)

    @property
    def streams(self) -> list[Stream]:
        """Their streams, likewise."""
        return list(self._here.values())

    def add(self, stream: Stream) -> None:
        """``stream`` decodes from the next step on."""
        self._here[stream.request.request_id] = stream

    def remove(self, request_id: int) -> None:
        """The stream decodes no more; one that does not is ignored."""
        if self._here.pop(request_id, None) is not None:
            self._proposer.release(request_id)

    def drop_drained(self) -> None:
        """Nothing: with drafts no step is planned before the tokens of the one before are known."""

    def due(self, clock: int) -> list[Stream]:
        """Any of them may end with any step."""
        return self.streams

    def entries(self, plan: BatchPlan) -> list[SequenceInput]:
        """The decodes of ``plan``, each with its drafts behind its latest token; names the blocks for them."""
        spare = plan.query_tokens_per_decode - 1
        self._here = {seq.request_id: self._here[seq.request_id] for seq in plan.speculating}
        asks = []
        for stream in self._here.values():
            count = min(spare, stream.limit - stream.generated - 1)
            table = self._pool.name_blocks(stream.seq, len(stream.tokens) + count)
            asks.append(Ask(stream.request.request_id, stream.tokens, count, table, stream.sampling))
        wanting = [ask for ask in asks if ask.count > 0]
        drafts = dict(zip([ask.request_id for ask in wanting], self._proposer.propose(wanting))) if wanting else {}
        return [self._entry(ask, *drafts.get(ask.request_id, NOTHING)) for ask in asks]

    def _entry(self, ask: Ask, drafts: Sequence[int], probabilities: Tensor | None) -> SequenceInput:
        tokens = [ask.tokens[-1], *drafts]
        start = len(ask.tokens) - 1
        blocks = self._pool.blocks_for(start + len(tokens))
        table = ask.table if len(ask.table) == blocks else ask.table[:blocks]
        return SequenceInput(ask.request_id, tokens, start, table, len(tokens), ask.sampling, 0, probabilities, self._here[ask.request_id].adapter)
