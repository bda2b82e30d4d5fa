"""The scorers of llm-d's endpoint picker, as the measured ladder configures them.

Each gives a pod a score between 0 and 1; the weighted sum decides, and equals are drawn (max-score-picker). Formulas from the sources
of gateway-api-inference-extension (queue-scorer, kv-cache-utilization-scorer, prefix-cache-scorer) and llm-d-inference-scheduler
(prefix-cache-scorer in mode cache_tracking, whose scores are spread over 0 to 1 among the pods that hold anything at all).
"""

from __future__ import annotations

from collections import OrderedDict

from serving.policies.protocols import Fleet
from serving.request import Request
from serving.rng import stream

SCRAPE_S = 0.05  # between two readings of a pod's metrics, the picker's default


class Scored:
    """Queue and KV scorers (weight 1 each) and a prefix scorer of ``prefix_weight``.

    Of the prefix the picker either asks the pods' own KV events, or, with ``believed_blocks``, remembers what it sent to each pod:
    that many blocks, the latest used, of which it takes the first ``considered_blocks`` of a prompt.
    """

    needs_load = True
    needs_queues = True

    def __init__(
        self,
        *,
        prefix_weight: float = 0.0,
        believed_blocks: int | None = None,
        considered_blocks: int | None = None,
        signal_age_s: float = SCRAPE_S,
        seed: int = 1,
    ) -> None:
        self.signal_age_s = signal_age_s
        self._prefix_weight = prefix_weight
        self._considered, self._limit = considered_blocks, believed_blocks
        self._believed: dict[int, OrderedDict] = {}
        self._draws = stream(seed, "routing.ties")

    def route(self, request: Request, fleet: Fleet) -> int:
        """The highest sum of scores."""
        pods = range(len(fleet.outstanding_tokens))
        queues = [fleet.waiting(pod) for pod in pods]
        shortest, longest = min(queues), max(queues)
        scores = [1.0 - fleet.kv_use(pod) + ((longest - queues[pod]) / (longest - shortest) if longest > shortest else 1.0) for pod in pods]
        keys = request.prefix_hashes[: self._considered]
        if self._prefix_weight:
            prefix = self._by_belief(keys, pods) if self._limit is not None else self._by_events(keys, fleet, pods)
            scores = [score + self._prefix_weight * share for score, share in zip(scores, prefix)]
        best = max(scores)
        chosen = [pod for pod in pods if scores[pod] == best]
        pod = chosen[int(self._draws.integers(len(chosen)))]
        if self._limit is not None:
            self._remember(keys, self._believed.setdefault(pod, OrderedDict()))
        return pod

    def _by_belief(self, keys: tuple, pods: range) -> list[float]:
        return [_leading(keys, self._believed.get(pod, ())) / max(len(keys), 1) for pod in pods]

    def _by_events(self, keys: tuple, fleet: Fleet, pods: range) -> list[float]:
        held = [fleet.cached_blocks(pod, keys) for pod in pods]
        some = [blocks for blocks in held if blocks]
        if not some:
            return [0.0 for _ in pods]
        least, most = min(some), max(some)
        return [0.0 if not blocks else 1.0 if least == most else (blocks - least) / (most - least) for blocks in held]

    def _remember(self, keys: tuple, believed: OrderedDict) -> None:
        for key in keys:
            believed.pop(key, None)
            believed[key] = None
        while len(believed) > self._limit:
            believed.popitem(last=False)


def _leading(keys: tuple, believed: OrderedDict | tuple) -> int:
    return next((i for i, key in enumerate(keys) if key not in believed), len(keys))
