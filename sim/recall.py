"""What stages before the model remember: outcomes by what was asked (system B3), and retrieval in three tiers (system B4).

Both are asked in the same order. ``look`` when a request comes: seconds, and what was found. Without a find the request is served;
``served`` when that is done gives further seconds, at whose end ``keep`` puts away what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from serving.policies import load
from serving.rng import stream
from serving.scenario.stages import Kept, KeyedCache, Retrieval
from serving.scenario.workload import Queries
from serving.ttl_lru import TtlLru
from serving.workload.classes import Shares
from serving.workload.lengths import one_by_one, seconds

HIT, MISS, DIRECT = "hit", "miss", "direct"
ANSWER, RESULTS, SEARCH = "answer", "results", "search"


class Found(NamedTuple):
    """What a look at a memory gave: after ``seconds``. ``served``: no server is needed; ``answer_tokens``: nor the model."""

    seconds: float
    outcome: str
    served: bool = False
    answer_tokens: int | None = None


def popularity(count: int, exponent: float, rng: np.random.Generator) -> Shares:
    """Draws of positions 0 ... count - 1 by Zipf's law."""
    return Shares((np.arange(1, count + 1, dtype=np.float64) ** -exponent).tolist(), rng)


def asked(queries: Queries, seed: int) -> Iterator[int]:
    """What each request asks, in order of arrival: the same whatever remembers it."""
    return one_by_one(popularity(queries.count, queries.zipf_exponent, stream(seed, "workload.queries")).draw)


def _cache(spec: Kept | None) -> TtlLru | None:
    return None if spec is None else TtlLru(spec.capacity_bytes, float("inf") if spec.ttl_s is None else spec.ttl_s)


class Keyed:
    """Outcomes of a stage by what was asked; a policy decides whether to look at all."""

    def __init__(self, spec: KeyedCache, seed: int, name: str, where: str) -> None:
        self._spec = spec
        self._policy = load("branch", spec.branch.name, spec.branch.options, where=where)
        self._cache = _cache(spec)
        self._lookup_s = one_by_one(seconds(spec.lookup_s, stream(seed, f"{name}.lookup")))
        self._direct = 0

    def look(self, key: int, now_s: float) -> Found:
        """As the policy says."""
        if not self._policy.cached(key):
            self._direct += 1
            return Found(0.0, DIRECT)
        lookup_s = next(self._lookup_s)
        hit = self._cache.get(key, now_s) is not None
        self._policy.observe(key, hit, lookup_s)
        return Found(lookup_s, HIT, True) if hit else Found(lookup_s, MISS)

    def served(self, key: int, now_s: float) -> float:
        """Nothing more to do."""
        return 0.0

    def keep(self, key: int, outcome: str, now_s: float) -> None:
        """Put away what was computed; to have done so tells whether it was there."""
        if outcome == HIT:
            return
        there = self._cache.put(key, True, self._spec.entry_bytes, now_s)
        if outcome == DIRECT:
            self._policy.observe(key, there, None)

    def report(self) -> dict[str, Any]:
        """Counts for a summary."""
        return {"cache": {**self._cache.report(), "direct": self._direct}}


class Recall:
    """Retrieval: answers given before, documents found before, documents themselves."""

    def __init__(self, spec: Retrieval, queries: Queries, seed: int, name: str) -> None:
        self._spec = spec
        self.answers, self._results, self._texts = (_cache(tier) for tier in (spec.answers, spec.results, spec.texts))
        found = popularity(spec.documents, spec.zipf_exponent, stream(seed, "workload.documents")).draw(queries.count * spec.per_query)
        self._found = found.reshape(queries.count, spec.per_query)  # the documents of each query: a fact of the corpus, not of the fleet
        self._fetch = seconds(spec.fetch_s, stream(seed, f"{name}.fetch"))
        self._fetched = 0

    def look(self, key: int, now_s: float) -> Found:
        """At the answers, then at the results."""
        lookup_s = self._spec.lookup_s
        answer = None if self.answers is None else self.answers.get(key, now_s)
        if answer is not None:
            return Found(lookup_s, ANSWER, True, answer)
        if self._results is not None and self._results.get(key, now_s) is not None:
            return Found(lookup_s, RESULTS, True)
        return Found(lookup_s, SEARCH)

    def served(self, key: int, now_s: float) -> float:
        """Seconds to fetch, side by side, the documents that are not here."""
        documents = dict.fromkeys(self._found[key].tolist())
        missing = sum(self._texts is None or self._texts.get(document, now_s) is None for document in documents)
        self._fetched += missing
        return float(self._fetch(missing).max()) if missing else 0.0

    def keep(self, key: int, outcome: str, now_s: float) -> None:
        """Put away the documents, and which they were."""
        if outcome == ANSWER:
            return
        if self._results is not None and outcome == SEARCH:
            self._results.put(key, True, self._spec.results.entry_bytes, now_s)
        if self._texts is not None:
            for document in dict.fromkeys(self._found[key].tolist()):
                self._texts.put(document, True, self._spec.texts.entry_bytes, now_s)

    def answered(self, key: int, tokens: int, now_s: float) -> None:
        """The model has answered: whoever asks the same may have it."""
        self.answers.put(key, tokens, self._spec.answers.entry_bytes, now_s)

    def report(self) -> dict[str, Any]:
        """Counts for a summary, by tier."""
        tiers = {"answers": self.answers, "results": self._results, "texts": self._texts}
        held = [tier for tier in tiers.values() if tier is not None]
        return {
            "retrieval": {
                **{name: tier.report() for name, tier in tiers.items() if tier is not None}, "fetched": self._fetched,
                "peak_bytes": sum(tier.peak_bytes for tier in held),
            }
        }  # fmt: skip


Memory = Keyed | Recall
