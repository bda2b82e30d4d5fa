"""A request on its way through one replica: what has been computed, what has been generated, what it holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from serving.request import Request

if TYPE_CHECKING:
    from serving.kv_pool import Extent

# DRAINING: its last token is planned but not yet known; it keeps its seat and its pages until then.
# PARKED: it holds pages but no seat, while its KV is copied out of this replica or into it.
WAITING, PREFILLING, DECODING, DRAINING, PARKED, ENDED = range(6)


class Sequence:
    """State of one request in a scheduler.

    There is no prefill phase and no decode phase as such: ``computed`` KV entries catch up with ``known_tokens`` (prompt plus
    generated); when they meet, the step samples the next token. While the sequence decodes, its counters are *not* touched at
    every step: they hold the values at ``entry_clock`` (the scheduler's count of decode steps when it joined), and
    ``Scheduler.settle`` brings them up to date when it leaves. The KV pages held are always ``ceil(computed / block_tokens)``,
    less those ``dropped`` where a retention policy works.
    """

    __slots__ = (
        "admission_index", "bypasses", "cached_tokens", "calm_steps", "computed", "dropped", "entry_clock", "extent", "first_token_s", "generated", "key",
        "keys", "preemptions", "request", "request_id", "scheduled_s", "shared_blocks", "state", "table", "token_s",
    )  # fmt: skip

    def __init__(self, request: Request, key: tuple, keys: tuple | None, extent: Extent | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.key = key  # the ordering policy's sort key, fixed at submission
        self.keys = keys  # content keys of the full blocks; None: content unknown
        self.state = WAITING
        self.computed = 0
        self.generated = 0
        self.entry_clock = 0
        self.preemptions = 0
        self.bypasses = 0
        self.cached_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.admission_index = 0
        self.extent = extent  # deepest cached extent on this sequence's path; the pool's root when there is none
        self.shared_blocks = 0  # blocks on that path; the rest of what it holds is private
        self.dropped = 0  # pages given back while it runs, by a retention policy
        self.calm_steps = 0  # decode steps in a row of low attention entropy
        self.table: list[int] | None = None  # physical block ids, only where the pool names them
        self.scheduled_s = math.nan
        self.first_token_s = math.nan
        self.token_s = math.nan  # time of the latest token known when it joined or left the decodes

    @property
    def known_tokens(self) -> int:
        """Tokens whose values are known: the prompt and what has been generated (settled value)."""
        return self.request.prompt_tokens + self.generated

    def __repr__(self) -> str:
        state = ("waiting", "prefilling", "decoding", "draining", "parked", "ended")[self.state]
        return f"Sequence({self.request_id}, {state}, computed={self.computed}, generated={self.generated})"
