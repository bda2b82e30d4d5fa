"""Small fleets that change while they serve: with faults, with an autoscaler, of one kind or with pools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from drivers import Case, Decisions, Served, build, totals_of

from serving.metrics import ERROR
from serving.request import Arrival
from serving.scenario.dynamics import Autoscaling, Fault, Faults
from serving.scenario.model import Targets
from sim.autoscaler import Autoscaler, State
from sim.dynamics import Fleet
from sim.environment import ARRIVAL, Environment
from sim.faults import FaultInjector

COLD_S = 0.4


@dataclass
class Changed:
    """What came of a run of a changing fleet."""

    served: Served
    fleet: Fleet
    injector: FaultInjector | None
    told: list[tuple[int, str]] = field(default_factory=list)  # requests of which watchers heard, and how they ended

    def outcomes(self) -> dict[int, int]:
        """Status code of each request's row."""
        columns = self.served.columns
        ids = columns["request_id"].tolist()
        assert len(set(ids)) == len(ids), "a request left twice"
        return dict(zip(ids, columns["status_code"].tolist()))


def injector_of(fleet: Fleet, metrics: Any, faults: Faults, seed: int, network: Any = None) -> FaultInjector:
    """Faults that record failed requests as ``sim.attach`` does."""

    def fail(request: Any, now_s: float) -> None:
        nan = math.nan
        metrics.finish(
            (
                request.request_id,
                metrics.class_index(request.class_name),
                request.arrival_s,
                request.prompt_tokens,
                0,
                0,
                nan,
                nan,
                now_s,
                0,
                -1,
                ERROR,
            )
        )

    return FaultInjector(fleet, faults, np.random.default_rng([7, seed]), network, fail)


def feed(env: Environment, cluster: Any, arrivals: Iterable[Arrival]) -> None:
    """Submit each request at its time."""

    def submit(arrival: Arrival) -> Callable:
        return lambda event: cluster.submit(arrival.request, arrival.output_tokens)

    for arrival in arrivals:
        env.at(arrival.request.arrival_s, submit(arrival), ARRIVAL)


def serve_changing(
    case: Case,
    arrivals: Sequence[Arrival],
    *,
    faults: Faults | None = None,
    policy: Any = None,
    bounds: tuple[int, int] = (1, 3),
    interval_s: float = 0.5,
    ready: int | None = None,
    stepwise: bool = False,
    audit_share: float = 0.0,
    seed: int = 0,
    probe: Callable[[Fleet], None] | None = None,
) -> Changed:
    """Serve ``arrivals`` to the end. ``policy`` scales within ``bounds``; ``probe(fleet)`` is called before time begins."""
    decisions = Decisions()
    env, cluster, metrics = build(case, stepwise=stepwise, audit_share=audit_share, decisions=decisions)
    fleet = Fleet(cluster, len(cluster.replicas) if ready is None else ready, lambda index: COLD_S, lambda index: case.scheduler())
    told: list[tuple[int, str]] = []
    cluster.on_outcome(lambda request_id, time_s, status: told.append((request_id, status)))
    if policy is not None:
        spec = Autoscaling(minimum=bounds[0], maximum=bounds[1], interval_s=interval_s)
        Autoscaler(fleet, spec, policy, State(fleet, lambda name: Targets(ttft_s=0.5)))
    injector = injector_of(fleet, metrics, faults, seed) if faults is not None else None
    if probe is not None:
        probe(fleet)
    feed(env, cluster, arrivals)
    env.run()
    cluster.drain()
    for replica in cluster.replicas:
        replica.scheduler.check()
        assert not replica.scheduler.live()
    assert not cluster.in_flight
    columns = metrics.columns()
    summary = metrics.summary(scenario="test", seed=0, totals=totals_of(cluster))
    return Changed(Served(cluster, metrics, decisions.rows, columns, summary), fleet, injector, told)


def random_faults(seed: int, replicas: int) -> Faults:
    """Losses, stalls and slow GPUs at fixed times and again and again, some of which overlap."""
    rng = np.random.default_rng([8, seed])
    events = []
    for _ in range(int(rng.integers(1, 5))):
        kind = ("replica_loss", "host_stall", "slow_gpu")[int(rng.integers(3))]
        when = {"at_s": float(rng.choice([0.0, 0.3, 1.0, 2.5]))} if rng.random() < 0.6 else {"every_s": float(rng.choice([0.5, 2.0]))}
        events.append(
            Fault(
                kind=kind, **when, for_s=float(rng.choice([0.05, 0.4] if kind == "host_stall" else [0.05, 0.4, 3.0])), replica=int(rng.integers(replicas)) if rng.random() < 0.5 else None,
                factor=float(rng.choice([1.5, 4.0])) if kind == "slow_gpu" else None,
            )
        )  # fmt: skip
    return Faults(events=tuple(events), lost_requests="retry" if rng.random() < 0.8 else "fail", retries=int(rng.integers(0, 4)))
