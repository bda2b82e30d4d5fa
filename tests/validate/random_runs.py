"""Random workloads and policies, served by the engine's loop on the stub runner: what parity is tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from serving import policies
from serving.scenario import Scenario, from_mapping

KINDS = ("ordering", "batching", "window", "preemption", "admission")
SHIPPED = [(kind, name) for kind in KINDS for name in policies.names(kind)]
OPTIONS = {
    ("ordering", "priority"): lambda rng: {"preempt": str(rng.choice(["none", "strict", "deadline"])), "slack_s": float(rng.uniform(0, 0.3))},
    ("ordering", "shortest_job"): lambda rng: {"ageing_tokens_per_s": float(rng.choice([0.0, 50.0, 500.0]))},
    ("ordering", "cache_affinity"): lambda rng: {"max_passes": int(rng.integers(0, 20))},
    ("window", "fixed"): lambda rng: {"window_s": float(rng.uniform(0.01, 0.2)), "size": int(rng.integers(1, 8))},
    ("window", "qos_adaptive"): lambda rng: {"start": 4, "largest": 16, "period": 10, "slo_s": [0.05, 0.1, 0.5]},
    ("window", "rtt_adaptive"): lambda rng: {"shortest_s": 0.01, "longest_s": 0.1, "samples": 8},
    ("admission", "fits"): lambda rng: {"max_queue": int(rng.integers(3, 40))},
    ("admission", "adaptive_burst"): lambda rng: {
        "tokens_per_s": float(rng.uniform(500, 5000)), "min_burst_tokens": 60.0, "max_burst_tokens": 500.0, "step_tokens": 50.0, "period": 4,
    },
    ("admission", "burn_rate"): lambda rng: {"budget": 0.05, "burn": float(rng.uniform(1, 8)), "window_s": 0.5, "open_s": 0.1, "least": 3},
    ("admission", "token_bucket"): lambda rng: {"tokens_per_s": float(rng.uniform(500, 5000)), "burst_tokens": float(rng.uniform(60, 400))},
}


def random_scenario(seed: int, focus: tuple[str, str] | None = None, requests: int = 40) -> tuple[Scenario, np.random.Generator]:
    """A scenario on a pool small enough to preempt; ``focus`` fixes one policy, the others are drawn. Returns the generator for more draws."""
    rng = np.random.default_rng(seed)
    chosen = {kind: str(rng.choice(policies.names(kind))) for kind in KINDS} | ({focus[0]: focus[1]} if focus else {})
    spec = {kind: {"name": name, **OPTIONS.get((kind, name), lambda rng: {})(rng)} for kind, name in chosen.items()}
    width = int(rng.choice([1, 4, 16]))
    longest = int(rng.integers(20, 120))
    seqs = int(rng.integers(2, 24))
    batching = {
        **spec.pop("batching"), "max_batch_tokens": seqs + int(rng.integers(1, 80)), "max_batch_seqs": seqs, "window": spec.pop("window"),
        "max_in_flight": int(rng.integers(1, 3)),
    }  # fmt: skip
    if rng.random() < 0.4 and "head_of_line" in policies.option_names("batching", chosen["batching"]):
        batching |= {"head_of_line": "skip", "max_bypasses": int(rng.integers(0, 8))}
    if rng.random() < 0.3:
        batching["max_chunk_tokens"] = int(rng.integers(4, 40))
    raw: dict[str, Any] = {
        "version": 1, "name": f"random-{seed}", "seed": seed, "llm": "smollm2-135m", "cluster": {"gpu": "h100-sxm"},
        "kv_cache": {"block_tokens": width, "blocks": 2 + -(-longest // width) + int(rng.integers(0, 3 * longest // width + 2))},
        "policy": {**spec, "batching": batching},
        "workload": _workload(rng, requests, longest),
        "slo": {"default": {"ttft_ms": 200}},
    }  # fmt: skip
    return from_mapping(raw), rng


def _workload(rng: np.random.Generator, requests: int, longest: int) -> dict[str, Any]:
    workload: dict[str, Any] = {
        "requests": requests,
        "arrivals": {"process": "poisson", "rate_rps": float(rng.uniform(10, 120))},
        "prompt_tokens": {"dist": "uniform", "min": 1, "max": longest - 10},
        "output_tokens": {"dist": "uniform", "min": 1, "max": int(rng.integers(2, 40))},
        "classes": [{"name": "p0", "priority": 0}, {"name": "p1", "priority": 1}, {"name": "p2", "priority": 2, "share": 2.0}],
    }
    kind = rng.random()
    if kind < 0.35:
        workload["prefix"] = {"groups": 3, "tokens": {"dist": "uniform", "min": 4, "max": longest // 2}, "share": 0.8}
    elif kind < 0.55:
        workload["sessions"] = {"turns": {"dist": "uniform", "min": 1, "max": 4}, "think_s": {"dist": "uniform", "min": 0.0, "max": 0.1}}
        workload["prompt_tokens"] = {"dist": "uniform", "min": 1, "max": longest // 4}
    elif kind < 0.7:
        workload["arrivals"] = {"process": "closed_loop", "users": int(rng.integers(1, 20)), "retry_s": 0.05}
    return workload


def with_more(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """The scenario with drafts, adapters or both, and now and then on two streams."""
    raw = scenario.resolved()
    drawn = rng.random()
    if drawn < 0.7:
        policies_ = [{"name": "fixed", "tokens": int(rng.integers(1, 9))}, {"name": "small_batch", "tokens": 4, "budget_tokens": int(rng.integers(4, 40))}]
        raw["speculation"] = {"policy": policies_[int(rng.integers(2))], "acceptance": 0.5, "proposer": {"name": "prompt_lookup", "longest": 2}}
        raw["policy"]["batching"]["max_in_flight"] = 1
    if drawn > 0.4:
        raw["adapters"] = {"slots": int(rng.integers(1, 4)), "rank": 4, "policy": str(rng.choice(policies.names("adapters"))), "max_bypasses": int(rng.integers(0, 9))}
        raw["workload"]["adapters"] = {"count": int(rng.integers(2, 6)), "share": float(rng.uniform(0.3, 1.0))}
    if rng.random() < 0.3 and raw["policy"]["batching"]["name"] == "chunked_prefill":
        raw["policy"]["batching"]["name"] = "two_streams"
    return from_mapping(raw)


def serve(
    scenario: Scenario, rng: np.random.Generator, out: Path | None = None, *, aborts: bool = True, wall: bool = False, fault=None, vocab: int = 1009
):  # fmt: skip
    """Serve ``scenario`` on the stub, its step times drawn from ``rng``; returns the loop, drained and checked. A small ``vocab`` repeats itself."""
    from engine.clocks import ReportedClock
    from engine.run import Engine, longest_sequence, serve_scenario
    from engine.stub_runner import StubRunner

    blocks = scenario.kv_cache.blocks
    longest = longest_sequence(scenario, blocks, 8192)
    runner = StubRunner(scenario.kv_cache.block_tokens, lambda batch: float(rng.choice([0.01, rng.uniform(0.002, 0.03)])), fault=fault, vocab=vocab)
    engine = Engine(runner, blocks, 2 * longest if wall else longest, vocab, "stub")
    loops = []

    def prepare(loop) -> None:
        loops.append(loop)
        if aborts:
            for request_id in range(0, scenario.workload.requests, 7):
                loop.env.at(float(rng.uniform(0, 1.5)), lambda _, one=request_id: loop.drop(one))

    run = serve_scenario(scenario, engine, ReportedClock(), out=out, prepare=prepare)
    loop = loops[0]
    assert not loop.scheduler.has_work and not loop.streams and not run.partial
    loop.scheduler.check()
    pool = loop.scheduler.pool
    assert pool.free == pool.total, "blocks leaked"
    assert len(set(pool._loose)) == pool.unused, "names leaked"
    return loop, run
