"""Small replicas and clusters over a linear latency model, and random cases to drive them with.

``Case`` is the whole configuration of a run, ``arrivals`` its requests; ``serve`` runs it under SimPy and returns all there
is to compare. Everything is a function of the case, so two runs of one case differ only by how they were driven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from serving.kv_pool import KVPool
from serving.metrics import FleetTotals, Metrics
from serving.plan import BatchPlan
from serving.policies import Limits, Policies, load
from serving.request import Arrival, Request
from serving.scheduler import Scheduler
from sim.cluster import Cluster
from sim.environment import ARRIVAL, Environment
from sim.replica import Replica


class Linear:
    """Seconds of a step: a constant, and so much per prefill token, per decode and per token of decode context."""

    def __init__(self, step_s: float = 0.01, prefill_token_s: float = 1e-5, decode_s: float = 1e-4, context_token_s: float = 1e-7) -> None:
        self._constants = (step_s, prefill_token_s, decode_s, context_token_s)

    def step_s(self, shape: Any) -> float:
        """One step."""
        fixed_s, prefill_s, decode_s, context_s = self._constants
        new = 0
        for tokens, _ in shape.chunks:
            new += tokens
        return fixed_s + prefill_s * new + decode_s * shape.decodes + context_s * shape.decode_context_tokens

    def run_s(self, shape: Any, steps: int) -> list[float]:
        """Successive decode steps, by the same operations in the same order."""
        fixed_s, prefill_s, decode_s, context_s = self._constants
        count, context = shape.decodes, shape.decode_context_tokens
        return [fixed_s + prefill_s * 0 + decode_s * count + context_s * (context + i * count) for i in range(steps)]


@dataclass(frozen=True)
class Case:
    """One configuration. ``policies`` maps a kind to (name, options); kinds left out are the plainest."""

    blocks: int = 65
    block_tokens: int = 16
    max_batch_tokens: int = 256
    max_batch_seqs: int = 16
    max_chunk_tokens: int | None = None
    policies: dict[str, tuple[str, dict]] = field(default_factory=dict)
    replicas: int = 1
    prefix_caching: bool = True
    max_in_flight: int = 1
    latency: Any = field(default_factory=Linear)

    def policy(self, kind: str) -> Any:
        """A fresh policy of ``kind``: they keep state."""
        plain = {"ordering": "fcfs", "batching": "chunked_prefill", "window": "none", "preemption": "latest", "admission": "fits",
                 "routing": "round_robin"}  # fmt: skip
        name, options = self.policies.get(kind, (plain[kind], {}))
        return load(kind, name, options) if isinstance(name, str) else name(**options)

    def with_policy(self, kind: str, name: Any, **options: Any) -> Case:
        """The same case under another policy; ``name`` may be a class."""
        return replace(self, policies={**self.policies, kind: (name, options)})

    def scheduler(self, *, named: bool = False) -> Scheduler:
        """A scheduler with a pool of its own."""
        limits = Limits(self.max_batch_tokens, self.max_batch_seqs, self.max_chunk_tokens)
        kinds = ("ordering", "batching", "window", "preemption", "admission")
        policies = Policies(*(self.policy(kind) for kind in kinds), limits)
        pool = KVPool(self.blocks, self.block_tokens, prefix_caching=self.prefix_caching, named=named)
        return Scheduler(pool, policies, max_in_flight=self.max_in_flight)


def request(request_id: int, arrival_s: float = 0.0, prompt: int = 32, cap: int = 4096, **facts: Any) -> Request:
    """A request, most of whose facts are of no interest."""
    return Request(request_id, arrival_s, prompt, cap, **facts)


class Decisions:
    """Stands in for ``serving.recording.Recording``: keeps what each plan decided, decode runs folded to a canonical form.

    Successive steps that only decode the same number of sequences, and after which nobody left, become one row, so that the
    rows of a run taken in one go equal those of the same steps taken one at a time.
    """

    every_step = False

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple]] = {}
        self._open: dict[int, bool] = {}

    def submitted(self, replica: int, request_id: int) -> None:
        """Part of the recorder's interface."""

    def aborted(self, replica: int, request_id: int) -> None:
        """Part of the recorder's interface."""

    def planned(self, replica: int, plan: BatchPlan) -> None:
        """Part of the recorder's interface."""

    def step(self, replica: int, plan: BatchPlan, start_s: float, end_s: float, used: int, finished: list) -> None:
        """Add a committed plan."""
        rows = self.rows.setdefault(replica, [])
        chunks = [(seq.request_id, *chunk) for seq, chunk in zip(plan.prefills, plan.chunks)]
        preempted = [seq.request_id for seq in plan.preempted]
        ended = [seq.request_id for seq in plan.ended]
        left = [(seq.request_id, reason) for seq, reason in finished]
        plain = not (chunks or preempted or ended)
        context = plan.decode_context_tokens
        if plain and self._open.get(replica) and rows[-1][2] == plan.decodes and rows[-1][1] == start_s:
            last = rows[-1]
            rows[-1] = (last[0], end_s, plan.decodes, last[3], last[4] + plan.steps, [], [], [], left)
        else:
            rows.append((start_s, end_s, plan.decodes, context, plan.steps, chunks, preempted, ended, left))
        self._open[replica] = plain and not left


@dataclass
class Served:
    """What came of a run."""

    cluster: Cluster
    metrics: Metrics
    decisions: dict[int, list[tuple]]
    columns: dict[str, np.ndarray]
    summary: dict

    def comparable(self) -> list:
        """All that must not depend on how the run was driven, as plain data with NaN made equal to itself."""
        columns = {name: [None if value != value else value for value in column.tolist()] for name, column in self.columns.items()}
        accounts = [
            (r.idle_s, r.pages.block_seconds, r.pages.max_blocks, r.last_end_s, r.prompt_tokens, r.cached_tokens, r.scheduler.steps,
             r.scheduler.preemptions, r.scheduler.pool.evictions, r.scheduler.pool.cached_keys())
            for r in self.cluster.replicas
        ]  # fmt: skip
        return [columns, self.summary, self.metrics.itl_gaps._bins.tolist(), self.decisions, accounts]


def build(case: Case, *, stepwise: bool = False, audit_share: float = 0.0, decisions: Any = None) -> tuple[Environment, Cluster, Metrics]:
    """A cluster of ``case`` and its metrics."""
    env = Environment()
    metrics = Metrics(["default", "p0", "p1"], lambda name: (math.inf,) * 3, keep_rows=True)
    audit = np.random.default_rng(5) if audit_share else None
    replicas = [
        Replica(index, case.scheduler(), case.latency, metrics, stepwise=stepwise, audit=audit, audit_share=audit_share, recording=decisions)
        for index in range(case.replicas)
    ]
    return env, Cluster(env, replicas, case.policy("routing"), stepwise=stepwise), metrics


def serve(
    case: Case,
    arrivals: Iterable[Arrival],
    *,
    aborts: Iterable[tuple[float, int]] = (),
    stepwise: bool = False,
    watch: Callable[[int, float, str], None] | None = None,
    audit_share: float = 0.0,
    record: bool = True,
) -> Served:
    """Serve ``arrivals`` (in order of time) to the end; abort the requests of ``aborts`` at their times."""
    decisions = Decisions()
    env, cluster, metrics = build(case, stepwise=stepwise, audit_share=audit_share, decisions=decisions if record else None)
    if watch is not None:
        cluster.on_outcome(watch)
    homes: dict[int, int] = {}

    def submit(arrival: Arrival) -> Callable:
        def call(event: object) -> None:
            homes[arrival.request.request_id] = cluster.submit(arrival.request, arrival.output_tokens)

        return call

    def abort(request_id: int) -> Callable:
        return lambda event: cluster.abort(request_id, homes[request_id])

    for arrival in arrivals:
        env.at(arrival.request.arrival_s, submit(arrival), ARRIVAL)
    for at_s, request_id in aborts:
        env.at(at_s, abort(request_id), ARRIVAL)
    env.run()
    cluster.drain()
    for replica in cluster.replicas:
        replica.scheduler.check()
    columns = metrics.columns()
    summary = metrics.summary(scenario="test", seed=0, totals=totals_of(cluster))
    return Served(cluster, metrics, decisions.rows, columns, summary)


def totals_of(cluster: Cluster) -> FleetTotals:
    """The fleet's totals, without the count of events, which is no result."""
    replicas = cluster.replicas
    pools = [replica.scheduler.pool for replica in replicas]
    return FleetTotals(
        duration_s=cluster.end_s, replicas=len(replicas), gpus=len(replicas), gpu_usd_per_h=None,
        busy_s=sum(cluster.end_s - replica.idle_s for replica in replicas), steps=sum(replica.scheduler.steps for replica in replicas),
        events=0, kv_blocks=sum(pool.total for pool in pools), kv_block_seconds=sum(replica.pages.block_seconds for replica in replicas),
        kv_max_fraction=max(replica.pages.max_blocks / pool.total for replica, pool in zip(replicas, pools)),
        preemptions=sum(replica.scheduler.preemptions for replica in replicas),
        prompt_tokens=sum(replica.prompt_tokens for replica in replicas), cached_tokens=sum(replica.cached_tokens for replica in replicas),
    )  # fmt: skip


# -- random cases -------------------------------------------------------------------------------------------------------

ORDERINGS = [
    ("fcfs", {}), ("priority", {"preempt": "none"}), ("priority", {"preempt": "strict"}), ("priority", {"preempt": "deadline", "slack_s": 0.1}),
    ("shortest_job", {"ageing_tokens_per_s": 100.0}), ("cache_affinity", {"max_passes": 4}),
]  # fmt: skip
BATCHINGS = [
    (name, {"head_of_line": mode, "max_bypasses": 3}) for name in ("chunked_prefill", "prefill_first", "two_streams", "whole_prompt") for mode in ("block", "skip")
] + [("prefix_sharing", {"look_ahead": 4, "max_bypasses": 3})]
WINDOWS = [
    ("none", {}), ("none", {}), ("fixed", {"window_s": 0.07, "size": 3}), ("qos_adaptive", {"period": 5, "start": 2, "max_wait_s": 0.06}),
    ("rtt_adaptive", {"shortest_s": 0.01, "longest_s": 0.1, "samples": 8, "size": 4}),
]  # fmt: skip
VICTIMS = [("latest", {}), ("lowest_priority", {}), ("least_progress", {})]
ADMISSIONS = [
    ("fits", {}), ("always", {}), ("fits", {"max_queue": 6}), ("token_bucket", {"tokens_per_s": 4000.0, "burst_tokens": 600.0}),
    ("burn_rate", {"least": 5, "open_s": 0.3}),
    ("adaptive_burst", {"tokens_per_s": 4000.0, "min_burst_tokens": 300.0, "max_burst_tokens": 2000.0, "period": 5}),
]  # fmt: skip
ROUTINGS = [
    ("round_robin", {}), ("least_outstanding_tokens", {"signal_age_s": 0.0}), ("least_outstanding_tokens", {"signal_age_s": 0.05}),
    ("prefix_affinity", {"signal_age_s": 0.03}), ("random", {"seed": 3}), ("topology_aware", {}),
    ("gossip_affinity", {"routers": 3, "period_s": 0.05, "signal_age_s": 0.03}),
]  # fmt: skip


def random_case(seed: int, replicas: int = 1) -> Case:
    """A configuration drawn by ``seed``: mostly pools so small that they preempt."""
    rng = np.random.default_rng([1, seed])

    def pick(choices: list) -> Any:
        return choices[int(rng.integers(len(choices)))]

    tokens = pick([48, 64, 128, 256])
    return Case(
        blocks=int(pick([14, 22, 40, 120])), block_tokens=pick([1, 4, 16]), max_batch_tokens=tokens, max_batch_seqs=pick([3, 6, 12, 32]),
        max_chunk_tokens=pick([None, None, 16, tokens]), prefix_caching=bool(rng.random() < 0.8), replicas=replicas,
        policies={
            "ordering": pick(ORDERINGS), "batching": pick(BATCHINGS), "window": pick(WINDOWS), "preemption": pick(VICTIMS),
            "admission": pick(ADMISSIONS), "routing": pick(ROUTINGS),
        },
    )  # fmt: skip


def random_arrivals(seed: int, case: Case, requests: int = 60) -> list[Arrival]:
    """Requests that fit ``case`` mostly, some sharing prefixes, some of them turns of sessions, at a rate drawn by ``seed``."""
    rng = np.random.default_rng([2, seed])
    width = case.block_tokens
    room = (case.blocks - 1) * width
    rate_rps = float(rng.choice([3.0, 12.0, 40.0, 200.0]))
    at_s, arrivals = 0.0, []
    for request_id in range(requests):
        at_s += float(rng.exponential(1 / rate_rps)) if rng.random() < 0.9 else 0.0
        prompt = int(rng.integers(1, max(2, int(room * 0.45))))
        if rng.random() < 0.03:
            prompt = room + int(rng.integers(-2, 3))
        output = int(rng.integers(1, max(2, min(60, int(room * 0.3)))))
        full = prompt // width
        shared = int(rng.integers(0, full + 1))
        family = int(rng.integers(0, 4))
        keys = tuple(("prefix", family, i) if i < shared else ("own", request_id, family, i) for i in range(full))
        session = int(rng.integers(0, 6)) if rng.random() < 0.4 else None
        if session is not None and full > 2:  # a turn that repeats a predecessor's prompt and what was generated for it
            keys = tuple(("session", session, i) for i in range(full))
        arrivals.append(
            Arrival(
                Request(
                    request_id, max(at_s, 1e-9), max(1, prompt), int(rng.choice([4096, 20])), priority=int(rng.integers(0, 3)),
                    class_name=f"p{rng.integers(0, 2)}", session=session, prefix_hashes=keys if rng.random() < 0.8 else (),
                    generated_hash_seed=None if session is None else ("generated", session), ttft_slo_s=float(rng.choice([0.15, 0.5, math.inf])),
                ),
                output,
            )
        )  # fmt: skip
    return arrivals


def random_aborts(seed: int, arrivals: list[Arrival], share: float = 0.15) -> list[tuple[float, int]]:
    """Times at which some of ``arrivals`` are given up: from at once to long after they have ended."""
    rng = np.random.default_rng([3, seed])
    given_up = [arrival.request for arrival in arrivals if rng.random() < share]
    return sorted((each.arrival_s + float(rng.choice([0.0, 0.003, 0.05, 0.3, 3.0])), each.request_id) for each in given_up)
