"""What a Prometheus server scrapes: counters, gauges and histograms under vLLM's names, whatever the backend."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from serving.http.backend import Departure, ReplicaState

if TYPE_CHECKING:
    from serving.http.delivery import TokenStream

PREFIX = "twinserve:"
SECONDS = tuple(step * 10.0**power for power in range(-3, 4) for step in (1.0, 2.5, 5.0))
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
REASONS = {"stop": "stop", "length": "length", "kv_capacity": "length", "aborted": "abort", "error": "error"}


class Buckets:
    """A histogram with fixed upper ``edges``; adding costs a bisection."""

    __slots__ = ("_counts", "_edges", "_total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value

    def rows(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper edge, the infinite one last, and the sum of the values."""
        rows, below = [], 0
        for edge, count in zip((*map(repr, self._edges), "+Inf"), self._counts):
            below += count
            rows.append((edge, below))
        return rows, self._total


class Telemetry:
    """Counts what streams tell; ``render`` adds what ``stats()`` says of the replicas at that moment."""

    def __init__(self, llm: str) -> None:
        self.generated = 0  # tokens
        self._prompted = 0
        self._llm = llm
        self._rejected: dict[str, int] = {}
        self._ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.ttft, self.itl, self._tpot, self._e2e, self._queue, self._prefill, self._decode = (Buckets(SECONDS) for _ in range(7))
        self._prompt_tokens, self._generation_tokens = Buckets(TOKENS), Buckets(TOKENS)
        self._histograms = {
            "time_to_first_token_seconds": (self.ttft, "Arrival to first token."),
            "inter_token_latency_seconds": (self.itl, "Between two tokens of a request."),
            "time_per_output_token_seconds": (self.itl, "The same, under the name that older dashboards use."),
            "request_time_per_output_token_seconds": (self._tpot, "First to last token by further token, of a request."),
            "e2e_request_latency_seconds": (self._e2e, "Arrival to last token."),
            "request_queue_time_seconds": (self._queue, "Arrival to the step that admits it."),
            "request_prefill_time_seconds": (self._prefill, "Admission to first token."),
            "request_decode_time_seconds": (self._decode, "First to last token."),
            "request_prompt_tokens": (self._prompt_tokens, "Prompt tokens of a request."),
            "request_generation_tokens": (self._generation_tokens, "Tokens generated for a request."),
        }

    def began(self, stream: TokenStream) -> None:
        """The stream has its first token."""
        self.ttft.add(stream.first_s - stream.arrival_s)
        self._prompted += stream.prompt_tokens

    def left(self, stream: TokenStream, departure: Departure) -> None:
        """The stream's request has left."""
        if departure.status == "rejected":
            self.rejected(departure.detail)
            return
        status = stream.ends_as if departure.status == "aborted" else departure.status
        self._ended[REASONS[status]] += 1
        if departure.scheduled_s == departure.scheduled_s:
            self._queue.add(departure.scheduled_s - stream.arrival_s)
        if status in ("aborted", "error") or not stream.count:
            return
        self._e2e.add(stream.last_s - stream.arrival_s)
        self._prompt_tokens.add(stream.prompt_tokens)
        self._generation_tokens.add(stream.count)
        self._decode.add(stream.last_s - stream.first_s)
        if departure.scheduled_s == departure.scheduled_s:
            self._prefill.add(stream.first_s - departure.scheduled_s)
        if stream.count > 1:
            self._tpot.add((stream.last_s - stream.first_s) / (stream.count - 1))

    def rejected(self, limit: str) -> None:
        """A request was turned away at ``limit``."""
        self._rejected[limit] = self._rejected.get(limit, 0) + 1

    def render(self, stats: Callable[[], list[ReplicaState]]) -> bytes:
        """The text that ``/metrics`` answers (exposition format 0.0.4)."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self, stats))
        return generate_latest(registry)

    def families(self, stats: list[ReplicaState]) -> Iterator[Metric]:
        """All metrics, in the library's terms."""
        yield from self._by_replica(stats)
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens whose request has a first token.", self._prompted),
            ("generation_tokens", "Tokens generated.", self.generated),
        ):
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            counter.add_metric([self._llm], value)
            yield counter
        for name, label, counts in (("request_success", "finished_reason", self._ended), ("requests_rejected", "limit", self._rejected)):
            counter = CounterMetricFamily(PREFIX + name, f"Requests by {label.replace('_', ' ')}.", labels=["model_name", label])
            for value, count in counts.items():
                counter.add_metric([self._llm, value], count)
            yield counter
        for name, (buckets, help_text) in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            rows, total = buckets.rows()
            family.add_metric([self._llm], rows, total)
            yield family

    def _by_replica(self, stats: list[ReplicaState]) -> Iterator[Metric]:
        for kind, name, help_text, field in (
            (GaugeMetricFamily, "num_requests_running", "Requests in the running batch.", "running"),
            (GaugeMetricFamily, "num_requests_waiting", "Requests that wait for admission.", "waiting"),
            (GaugeMetricFamily, "kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", "kv_usage"),
            (CounterMetricFamily, "num_preemptions", "Preemptions.", "preemptions"),
            (CounterMetricFamily, "prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_queries"),
            (CounterMetricFamily, "prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_hits"),
        ):
            family = kind(PREFIX + name, help_text, labels=["model_name", "engine"])
            for index, state in enumerate(stats):
                family.add_metric([self._llm, str(index)], getattr(state, field))
            yield family
        states = GaugeMetricFamily(
            PREFIX + "replica_state", "1 for the state that a replica is in.", labels=["model_name", "engine", "pool", "state"]
        )
        for index, state in enumerate(stats):
            states.add_metric([self._llm, str(index), state.pool, state.state], 1)
        yield states


class _Families:
    """What the library calls a collector."""

    def __init__(self, telemetry: Telemetry, stats: Callable[[], list[ReplicaState]]) -> None:
        self._telemetry = telemetry
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        return self._telemetry.families(self._stats())
