"""Routers that learn from each other by gossip: what staleness costs in hits, and what freshness costs in messages."""

from __future__ import annotations

import pytest

from serving.scenario import from_mapping
from sim.run import simulate


def scenario(**routing: object):
    workload = {"requests": 350, "arrivals": {"process": "poisson", "rate_rps": 12.0}, "prompt_tokens": {"dist": "uniform", "min": 200, "max": 900},
                "output_tokens": {"dist": "uniform", "min": 5, "max": 40},
                "sessions": {"turns": {"dist": "constant", "value": 5}, "think_s": {"dist": "exponential", "mean": 2.0}}}  # fmt: skip
    return from_mapping({"name": "x", "llm": "qwen2.5-0.5b", "max_model_len": 16384, "cluster": {"gpu": "h100-sxm", "replicas": 6},
                         "policy": {"routing": {"name": "gossip_affinity", **routing}}, "workload": workload})  # fmt: skip


def test_the_longer_between_rounds_the_fewer_hits_and_messages():
    found = [simulate(scenario(routers=6, period_s=period_s)).summary for period_s in (0.2, 2.0, 20.0, None)]
    hits = [summary["prefix_cache_hit_rate"] for summary in found]
    messages = [summary["coherence"]["messages"] for summary in found]
    assert hits[0] > hits[1] + 0.01 and hits[1] > hits[2] + 0.01 and hits[2] >= hits[3]
    assert messages[0] > 2 * messages[1] > 4 * messages[2] > messages[3] == 0
    assert found[1]["coherence"]["lag_s"]["mean"] > 5 * found[0]["coherence"]["lag_s"]["mean"]


def test_a_quorum_reads_what_gossip_has_not_told():
    alone, quorum, told = (simulate(scenario(routers=6, **options)).summary for options in ({"period_s": None}, {"period_s": None, "f": 1}, {"period_s": 0}))
    assert alone["prefix_cache_hit_rate"] + 0.1 < quorum["prefix_cache_hit_rate"] <= told["prefix_cache_hit_rate"] + 0.01
    assert quorum["coherence"]["messages"] == 350 * 2 * 2, "two asked, two answers, for every request"


def test_one_router_alone_is_prefix_affinity():
    asked = scenario(routers=1)
    plain = asked.model_copy(update={"policy": asked.policy.model_copy(update={"routing": asked.policy.routing.model_copy(update={"name": "prefix_affinity", "options": {}})})})
    one, other = simulate(asked).summary, simulate(plain).summary
    assert one.pop("coherence")["messages"] == 0 and one == other


@pytest.mark.parametrize("options", [{"period_s": 1.0}, {"period_s": 1.0, "f": 1, "signal_age_s": 0.1}])
def test_fast_equals_stepwise(options):
    asked = scenario(routers=3, **options)
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0} and fast["requests"]["completed"] == 350
