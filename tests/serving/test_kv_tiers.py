"""Lower KV tiers: what they keep, what a load costs, and that a hit there changes what users see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InputError
from serving.kv_tiers import LowerTiers, TierSpec
from serving.scenario import load
from sim.run import simulate

MIB = 2**20


def tiers(*blocks: int) -> LowerTiers:
    return LowerTiers([TierSpec(f"tier{i}", count, 50e9 / (i + 1), 50e9, 1e-5) for i, count in enumerate(blocks)], 2 * MIB)


def test_the_oldest_of_equally_cold_pages_is_passed_down_and_then_forgotten():
    lower = tiers(2, 1)
    lower.store(["a", "b", "c"])
    assert lower.find(("a", "b", "c"), 0, 3) == [2, 1]
    lower.store(["d"])
    assert lower.find(("a",), 0, 1) == [0, 0] and lower.forgotten == 1
    assert lower.find(("b", "c", "d"), 0, 3) == [2, 1]


def test_a_page_that_is_used_again_outlives_pages_that_are_read_once():
    lower = tiers(4)
    lower.store(["hot"])
    for _ in range(3):
        lower.load(["hot"])
    lower.store([f"cold{i}" for i in range(12)])
    assert lower.find(("hot",), 0, 1) == [1]


def test_pinned_pages_stay():
    lower = tiers(3)
    lower.pin(["system"])
    lower.store(["system"])
    lower.store([f"page{i}" for i in range(9)])
    assert lower.find(("system",), 0, 1) == [1]
    lower.unpin(["system"])
    lower.store([f"more{i}" for i in range(9)])
    assert lower.find(("system",), 0, 1) == [0]


def test_heat_saturates_and_cools():
    lower = tiers(4)
    lower.store(["a", "b"])
    lower.load(["b"])
    for _ in range(600):
        lower.load(["a"])
    assert max(lower._heat.values()) <= LowerTiers.HOTTEST
    lower.check()


def test_a_load_costs_latency_and_bytes_of_each_tier():
    lower = tiers(8, 8)
    assert lower.load_s([3, 2]) == pytest.approx(1e-5 + 3 * 2 * MIB / 50e9 + 1e-5 + 2 * 2 * MIB / 25e9)
    assert lower.load_s([0, 0]) == 0.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["store", "load"]), st.integers(0, 30)), max_size=120), st.integers(1, 6), st.integers(1, 6))
def test_tiers_never_hold_more_than_they_can_and_lose_nothing_but_what_they_forget(operations, first, second):
    lower = tiers(first, second)
    for kind, key in operations:
        getattr(lower, kind)([key]) if kind == "store" or sum(lower.find((key,), 0, 1)) else None
        lower.check()
    held = {key for key in range(31) if sum(lower.find((key,), 0, 1))}
    stored = {key for kind, key in operations if kind == "store"}
    assert held <= stored and len(stored - held) <= lower.forgotten


def offload(**overrides: str) -> dict:
    settings_ = {"workload.requests": "250", "kv_cache.blocks": "2200", **overrides}
    return simulate(load("kv-offload", [f"{key}={value}" for key, value in settings_.items()])).summary


def test_a_larger_host_tier_raises_the_hit_rate_and_lowers_the_time_to_first_token():
    """Case Q3: the size of a cache must show in latency, not in a counter alone."""
    sizes = [offload(**{"kv_cache.tiers": f"[{{name: host, gib: {gib}}}]"}) for gib in (0.5, 8, 128)]
    hits = [summary["prefix_cache_hit_rate"] for summary in sizes]
    waits = [summary["ttft_s"]["mean"] for summary in sizes]
    assert hits[0] < hits[1] < hits[2]
    assert waits[0] > waits[1] > waits[2]


def test_never_reloading_equals_having_no_tier_and_cheaper_is_never_worse_than_both():
    without = offload(**{"kv_cache.tiers": "[]"})
    never = offload(**{"policy.reload": "never"})
    assert never["ttft_s"] == without["ttft_s"]
    cheaper = offload(**{"policy.reload": "cheaper"})
    assert cheaper["ttft_s"]["mean"] < never["ttft_s"]["mean"]


def test_a_slow_tier_is_not_worth_reading_and_the_policy_sees_it():
    slow = "[{name: host, gib: 64, read_bytes_per_s: 1.0e+7}]"
    always = offload(**{"kv_cache.tiers": slow, "workload.requests": "60"})
    cheaper = offload(**{"kv_cache.tiers": slow, "workload.requests": "60", "policy.reload": "cheaper"})
    assert cheaper["ttft_s"]["mean"] < always["ttft_s"]["mean"]


@pytest.mark.parametrize(
    ("overrides", "where"),
    [({"kv_cache.tiers": "[{name: host, gib: 0.0000001}]"}, "kv_cache.tiers"), ({"kv_cache.prefix_caching": "false"}, "kv_cache.tiers")],
)
def test_a_tier_smaller_than_a_page_or_without_content_names_is_refused(overrides, where):
    with pytest.raises(InputError, match=where.replace(".", r"\.")):
        offload(**overrides)
