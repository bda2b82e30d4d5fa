"""What a configuration serves when it never waits for work: the denominator of every load factor."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace

from serving.request import Arrival
from sim.cluster import Cluster
from sim.fleet import Parts, build_cluster, crowded, new_metrics

SAMPLE = 4096  # requests of the backlog; the first and last quarter (filling and draining) are not counted


def saturated_fleet_rps(parts: dict[str, Parts]) -> float | None:
    """As ``saturated_rps`` for a whole fleet: with pools, the rate of the slower one. Links are taken to keep up."""
    rates = [saturated_rps(part, role) for role, part in parts.items()]
    return None if None in rates else min(rates)


def saturated_rps(parts: Parts, role: str = "replicas") -> float | None:
    """Requests per second that the fleet completes with a backlog of this workload's requests; None if too few to tell.

    One replica is measured (all are alike) in the middle half of the completions of a backlog that is there from the start.
    Admission limits do not apply: the question is what the replica can do, not what is let in. A ``prefill`` replica
    completes a request with its first token; a ``decode`` replica finds the KV of its prompts in place.
    """
    from serving.scenario import PolicySpec
    from serving.scenario.arrivals import AllAtOnce
    from serving.workload import conversations

    scenario = parts.scenario
    workload = scenario.workload
    if workload.trace is None:
        saturating = workload.model_copy(update={"arrivals": AllAtOnce(process="all_at_once"), "requests": SAMPLE, "duration_s": None})
    else:
        saturating = workload
    policy = scenario.policy.model_copy(update={"admission": PolicySpec(name="fits", where="policy.admission")})
    alone = scenario.model_copy(update={"policy": policy})
    one = replace(parts, scenario=alone, latency=crowded(parts), latencies=())
    cluster = build_cluster(one, new_metrics(alone), replicas=1)
    replica = cluster.replicas[0]
    finishes: list[float] = []
    replica.on_finish = lambda request_id, time_s, status: finishes.append(time_s) if time_s > 0 else None
    sessions = conversations(
        saturating, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=parts.max_model_len,
        prefix_caching=scenario.kv_cache.prefix_caching, slo=scenario.slo,
    )  # fmt: skip
    turns = itertools.islice((turn.arrival for session in sessions for turn in session.turns), SAMPLE)
    backlog = [Arrival(request._replace(arrival_s=0.0), output_tokens) for request, output_tokens in turns]
    if role == "decode":
        _land_all(cluster, [arrival for arrival in backlog if arrival.output_tokens > 1])
    else:
        for request, output_tokens in backlog:
            replica.submit(request, 1 if role == "prefill" else output_tokens, 0.0)
        cluster.drain()
    first, last = len(finishes) // 4, 3 * len(finishes) // 4
    if last - first < 2 or finishes[last] <= finishes[first]:
        return None
    return (last - first) / (finishes[last] - finishes[first]) * scenario.cluster.replicas


def _land_all(cluster: Cluster, backlog: list[Arrival]) -> None:
    """Give the only replica of ``cluster`` the KV of as many requests as it has pages for, at any time."""
    replica, env = cluster.replicas[0], cluster.env
    left = deque(backlog)

    def land(*_: object) -> None:
        while left:
            request, output_tokens = left[0]
            seq = replica.reserve(request, 1, env.now)
            if seq is None:
                return
            replica.land(seq, output_tokens, env.now)
            left.popleft()

    count = replica.on_finish
    cluster.on_outcome(count)
    cluster.on_outcome(land)
    land()
    cluster.arm(replica)
    env.run()
