"""Random scenarios with stages, memories, images and sites before fleets of every kind: nobody is lost, and fast equals stepwise."""

from __future__ import annotations

import random

import pytest

from serving.errors import InputError
from serving.scenario import from_mapping
from sim.run import simulate
from validate.regress.drive import drive

TIER = {"capacity_bytes": 3000.0, "entry_bytes": 100.0}
COLD = {"schedule_s": 0.05, "compile_s": 0.0, "graph_capture_s": 0.0, "warmup_s": 0.0}
SCALED = {"maximum": 3, "interval_s": 0.3, "cold_start": COLD, "policy": {"name": "utilisation", "target": 0.2, "hold_s": 0.5}}
FLEETS = ("plain", "sites", "sites and release", "pools", "release", "scaling", "faults", "retries")


def constant(value: float) -> dict:
    return {"dist": "constant", "value": value}


def exponential(mean: float) -> dict:
    return {"dist": "exponential", "mean": mean}


def workload(draw: random.Random) -> dict:
    work = {
        "requests": 150, "prompt_tokens": {"dist": "uniform", "min": 16, "max": 900}, "output_tokens": {"dist": "uniform", "min": 1, "max": 60},
        "classes": [{"name": "a"}, {"name": "b", "priority": 1}], "queries": {"count": draw.choice([1, 20, 500])},
        "arrivals": draw.choice([{"process": "poisson", "rate_rps": draw.choice([5.0, 40.0, 300.0])}, {"process": "closed_loop", "users": 5}, "all_at_once"]),
    }  # fmt: skip
    if draw.random() < 0.4:
        work["sessions"] = {"turns": {"dist": "uniform", "min": 1, "max": 4}, "think_s": exponential(0.3)}
    if draw.random() < 0.5:
        tokens = {"dist": "uniform", "min": 20, "max": 500}
        work["images"] = {"count": draw.choice([1, 30]), "share": 0.6, "tokens": tokens, "shared_pages": draw.random() < 0.7}
    return work


def kept(draw: random.Random) -> dict:
    return {**TIER, **({"ttl_s": draw.choice([0.2, 5.0])} if draw.random() < 0.5 else {})}


def stages(draw: random.Random, images: bool) -> list[dict]:
    cache = {**kept(draw), "lookup_s": exponential(0.004), "branch": draw.choice(["always", "never", "predicted"])}
    features = {"name": "features", "service_s": exponential(0.01), "servers": draw.choice([1, 3]), "share": draw.choice([1.0, 0.5]), "cache": cache}
    facts = {"documents": 50, "per_query": 3, "fetch_s": constant(draw.choice([0.0, 0.02])), "lookup_s": draw.choice([0.0, 0.001])}
    tiers = {tier: kept(draw) for tier in ("answers", "results", "texts") if draw.random() < 0.6}
    retrieval = {"name": "retrieval", "service_s": constant(draw.choice([0.0, 0.03])), "servers": 2, "classes": draw.choice([[], ["a"]]),
                 "adds_tokens": {"dist": "uniform", "min": 0, "max": 300}, "retrieval": facts | tiers}  # fmt: skip
    post = {"name": "post", "after_answer": True, "service_s": exponential(0.02), "servers": draw.choice([1, 2]), "share": 0.7}
    encoder = {"name": "encoder", "encodes_images": True, "service_s": constant(0.01), "cache": {**TIER, "lookup_s": constant(0.001)}}
    return [stage for stage in (post, features, retrieval, *([encoder] if images else [])) if draw.random() < 0.7]


def sites(draw: random.Random) -> dict:
    def uplink() -> dict:
        return {"round_trip_s": draw.choice([0.0, 0.02]), "bytes_per_s": draw.choice([1e4, 1e8])}

    routing = draw.choice(["nearest", "innermost", {"name": "spill_over", "max_waiting": 1}, {"name": "by_class", "tiers": {"a": "c"}}])
    places = [{"name": "e", "users": 1, "replicas": 2, "inward": "c", "uplink": uplink(), "max_model_len": draw.choice([4096, 900])},
              {"name": "f", "users": 1, "replicas": 0, "inward": "c", "uplink": uplink()}, {"name": "c", "replicas": 2}]  # fmt: skip
    return {"routing": routing, "places": places}


def scenario(seed: int) -> dict:
    draw, kind = random.Random(seed), FLEETS[seed % len(FLEETS)]
    work, cluster = workload(draw), {"gpu": "h100-sxm", "replicas": 3}
    raw = {"name": kind, "seed": seed, "llm": "qwen2.5-0.5b", "max_model_len": 4096, "cluster": cluster, "workload": work}
    raw["stages"] = stages(draw, "images" in work)
    if kind.startswith("sites"):
        raw |= {"sites": sites(draw), "cluster": {"gpu": "h100-sxm"}}
    if kind.endswith("release"):
        rows = [{"name": "s", "share": 0.5, "for_s": 1.0, "check": "probe"}, {"name": "t", "share": 0.7, "for_s": 1.0}]
        raw["rollout"] = {"candidate": {"step_time_factor": 1.2}, "least": 5, "stages": rows}
    elif kind == "pools":
        pools = [{"role": role, "replicas": 2, **({"autoscaling": SCALED} if draw.random() < 0.6 else {})} for role in ("prefill", "decode")]
        raw["cluster"] = {"gpu": "h100-sxm", "topology": "dgx-h100", "pools": pools}
    elif kind == "scaling":
        cluster |= {"replicas": 1, "autoscaling": SCALED}
    elif kind == "faults":
        raw["faults"] = {"events": [{"kind": "replica_loss", "every_s": 0.7, "for_s": 0.1}], "cold_start": COLD, "retries": draw.choice([0, 5])}
    elif kind == "retries":
        raw["policy"] = {"admission": {"name": "token_bucket", "tokens_per_s": 20000.0, "burst_tokens": 3000.0}}
        work["retry"] = {"attempts": 3, "backoff_s": 0.1}
    return raw


@pytest.mark.parametrize("seed", range(16))
def test_nobody_is_lost_and_fast_equals_stepwise(seed):
    asked = from_mapping(scenario(seed))
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0}
    counts = fast["requests"]
    assert counts["arrived"] == counts["completed"] + counts["rejected"] + counts["failed"] > 0
    if asked.name not in ("faults", "retries"):
        assert counts["arrived"] == counts["completed"]


@pytest.mark.parametrize("key", ["sites", "stages"])
def test_a_suite_of_the_gate_refuses_what_it_would_leave_out(key):
    asked = from_mapping(scenario(1))
    other = {"sites": "stages", "stages": "sites"}[key]
    with pytest.raises(InputError) as caught:
        drive(asked.model_copy(update={other: () if other == "stages" else None}))
    assert caught.value.where == key
