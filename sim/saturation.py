"""What a configuration serves when it never waits for work: the denominator of every load factor."""

from __future__ import annotations

from sim.fleet import Parts, build_cluster, new_metrics

SAMPLE = 4096  # requests of the backlog; the first and last quarter (filling and draining) are not counted


def saturated_rps(parts: Parts) -> float | None:
    """Requests per second that the fleet completes with a backlog of this workload's requests; None if too few to tell.

    One replica is measured (all are alike) in the middle half of the completions of a backlog that is there from the start.
    Admission limits do not apply: the question is what the replica can do, not what is let in.
    """
    from serving.scenario import PolicySpec
    from serving.scenario.arrivals import AllAtOnce
    from serving.workload import open_arrivals

    scenario = parts.scenario
    workload = scenario.workload
    if workload.trace is None:
        backlog = workload.model_copy(update={"arrivals": AllAtOnce(process="all_at_once"), "requests": SAMPLE, "duration_s": None, "sessions": None})
    else:
        backlog = workload.model_copy(update={"trace": workload.trace.model_copy(update={"turn_timing": "recorded"})})
    policy = scenario.policy.model_copy(update={"admission": PolicySpec(name="fits", where="policy.admission")})
    alone = scenario.model_copy(update={"policy": policy})
    one = Parts(alone, parts.llm, parts.gpu, parts.capacity, parts.latency, parts.max_model_len)
    cluster = build_cluster(one, new_metrics(alone), replicas=1)
    replica = cluster.replicas[0]
    finishes: list[float] = []
    replica.on_finish = lambda request_id, time_s, status: finishes.append(time_s) if time_s > 0 else None
    arrivals = open_arrivals(
        backlog, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=parts.max_model_len,
        prefix_caching=scenario.kv_cache.prefix_caching, slo=scenario.slo,
    )  # fmt: skip
    for arrival, _ in zip(arrivals, range(SAMPLE)):
        replica.submit(arrival.request._replace(arrival_s=0.0), arrival.output_tokens, 0.0)
    cluster.drain()
    first, last = len(finishes) // 4, 3 * len(finishes) // 4
    if last - first < 2 or finishes[last] <= finishes[first]:
        return None
    return (last - first) / (finishes[last] - finishes[first]) * scenario.cluster.replicas
