"""Content keys of prompt blocks: shared prefixes of groups, and suffixes that no other request has.

Keys are whole numbers, cheap to make and to hash. Block i of group g has the key g * 2^24 + i; block i of the content that
only request r has, the key 2^60 + r * 2^24 + i. A prompt has at most 2^24 blocks here; longer ones keep their first keys.
"""

from __future__ import annotations

import numpy as np

from serving.scenario.workload import Prefix
from serving.workload.classes import Shares
from serving.workload.context import Context
from serving.workload.lengths import one_by_one, tokens

GROUP_SPAN = 1 << 24
OWN_CONTENT = 1 << 60


class SharedPrefixes:
    """Assigns groups to requests and makes the keys of their prompts."""

    def __init__(self, spec: Prefix, context: Context) -> None:
        self._spec = spec
        self._block_tokens = context.block_tokens
        self._rng = context.rng("prefix")
        self._lengths = one_by_one(tokens(spec.tokens, context.rng("prefix.tokens")))
        popularity = np.arange(1, spec.groups + 1, dtype=np.float64) ** -spec.zipf_exponent
        self._groups = Shares(popularity.tolist(), context.rng("prefix.groups"))
        self._blocks: list[int] = []
        self._keys: dict[int, tuple[int, ...]] = {}

    def draw(self, n: int) -> list[int]:
        """Return the group of each of ``n`` requests, or -1 for those that begin like no other."""
        groups = self._groups.draw(n)
        if self._spec.share < 1.0:
            groups = np.where(self._rng.random(n) < self._spec.share, groups, -1)
        return groups.tolist()

    def keys(self, group: int, request_id: int, prompt_tokens: int) -> tuple[int, ...]:
        """Return the keys of the full blocks of a prompt that begins with the prefix of ``group``."""
        blocks = min(prompt_tokens // self._block_tokens, GROUP_SPAN)
        shared = self.group_keys(group)[:blocks] if group >= 0 else ()
        if not self._spec.cache_suffix or len(shared) == blocks:
            return shared
        own = OWN_CONTENT + request_id * GROUP_SPAN
        return (*shared, *range(own + len(shared), own + blocks))

    def group_keys(self, group: int) -> tuple[int, ...]:
        """Return the keys of a group's full blocks. Lengths are drawn in order of the groups, so that they do not depend on use."""
        while len(self._blocks) <= group:
            self._blocks.append(min(next(self._lengths) // self._block_tokens, GROUP_SPAN))
        keys = self._keys.get(group)
        if keys is None:
            first = group * GROUP_SPAN
            keys = self._keys[group] = tuple(range(first, first + self._blocks[group]))
        return keys
