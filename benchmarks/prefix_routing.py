"""Prefix affinity against load over fleets of several sizes, on the Mooncake trace or its synthetic stand-in.

    python -m benchmarks.prefix_routing --trace $TWINSERVE_DATA/traces/mooncake_fast25/conversation_trace.jsonl.gz

The arrival rate grows with the fleet, so that every size is equally loaded: what changes is how many replicas a prefix can be on.
``spread`` is the largest share of requests on one replica over the mean share.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from serving.clients import start_clients
from serving.scenario import Scenario, load
from sim.fleet import build_fleet, new_metrics, resolve_fleet

POLICIES = {
    "random": ["policy.routing=random"],
    "round_robin": ["policy.routing=round_robin"],
    "least_outstanding": ["policy.routing=least_outstanding_tokens"],
    "affinity, load 0.1": ["policy.routing.load_weight=0.1"],
    "affinity, load 0.5": ["policy.routing.load_weight=0.5"],
    "affinity, load 2": ["policy.routing.load_weight=2.0"],
}


def scenario(replicas: int, overrides: list[str], trace: Path | None, limit: int, host_gib: float) -> Scenario:
    """The scenario ``mooncake-routing`` for a fleet of ``replicas``, loaded as eight are, each with ``host_gib`` of memory for KV."""
    common = [f"cluster.replicas={replicas}"]
    if host_gib:
        common += [f"kv_cache.tiers=[{{name: host, gib: {host_gib}}}]"]
    if trace is None:
        common += [f"workload.requests={limit}", f"workload.arrivals.rate_rps={1.5 * replicas}"]
        return load("mooncake-routing", [*common, *overrides])
    given = load("mooncake-routing", [*common, *overrides], None, trace)
    recorded = given.workload.trace.model_copy(update={"limit": limit, "rate_scale": replicas / 3})
    return given.model_copy(update={"workload": given.workload.model_copy(update={"trace": recorded})})


def measure(chosen: Scenario) -> dict[str, float]:
    """Figures of one run."""
    parts = resolve_fleet(chosen)
    metrics = new_metrics(chosen, keep_rows=True)
    cluster = build_fleet(chosen, parts, metrics)
    start_clients(
        cluster, chosen.workload, seed=chosen.seed, block_tokens=chosen.kv_cache.block_tokens, max_model_len=parts["replicas"].max_model_len,
        prefix_caching=True, saturation_rps=lambda: 0.0, slo=chosen.slo,
    )  # fmt: skip
    cluster.env.run()
    cluster.drain()
    routed = np.bincount(metrics.columns()["replica"], minlength=chosen.cluster.replicas)
    rows = metrics.columns()
    ttft_s = rows["first_token_s"] - rows["arrival_s"]
    tpot_s = (rows["finish_s"] - rows["first_token_s"]) / np.maximum(1, rows["output_tokens"] - 1)
    met = (ttft_s <= chosen.slo.targets("default").ttft_s) & (tpot_s <= chosen.slo.targets("default").tpot_s)
    return {
        "hit rate": sum(one.cached_tokens for one in cluster.replicas) / sum(one.prompt_tokens for one in cluster.replicas),
        "TTFT mean s": float(ttft_s.mean()),
        "TTFT p99 s": float(np.percentile(ttft_s, 99)),
        "TPOT p99 ms": float(np.percentile(tpot_s, 99)) * 1e3,
        "SLO": float(met.mean()),
        "spread": float(routed.max() / routed.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--limit", type=int, default=6000, help="requests of each run")
    parser.add_argument("--host-gib", type=float, default=0.0, help="host memory of each GPU that keeps evicted pages")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8, 16])
    arguments = parser.parse_args()
    header = None
    for replicas in arguments.replicas:
        for name, overrides in POLICIES.items():
            row = measure(scenario(replicas, overrides, arguments.trace, arguments.limit, arguments.host_gib))
            if header is None:
                header = f"{'replicas':>8}  {'routing':<20}" + "".join(f"{key:>13}" for key in row)
                print(header)
            print(f"{replicas:>8}  {name:<20}" + "".join(f"{value:>13.3f}" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
