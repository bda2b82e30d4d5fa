"""Lower KV tiers: what they keep, what a load costs, and that a hit there changes what users see."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InputError
from serving.kv_tiers import LowerTiers, TierSpec
from serving.policies import load as load_policy
from serving.policies.eviction.heat import HOTTEST, Heat
from serving.scenario import load
from sim.run import simulate

MIB = 2**20


def tiers(*blocks: int, eviction: str = "heat", **options: int) -> LowerTiers:
    specs = [TierSpec(f"tier{i}", count, 50e9 / (i + 1), 50e9, 1e-5) for i, count in enumerate(blocks)]
    return LowerTiers(specs, 2 * MIB, load_policy("eviction", eviction, options))


def read(lower: LowerTiers, keys: list) -> None:
    """A step reads ``keys`` back, and is over."""
    lower.load(keys)
    lower.landed()


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
        read(lower, ["hot"])
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


def test_a_pinned_page_stays_though_everything_else_must_leave_and_keeps_its_heat():
    lower = tiers(2, 1)
    lower.pin(["a", "b"])
    lower.store(["a", "b", "c", "d"])
    assert lower.find(("a", "b"), 0, 2) == [2, 0] and lower.find(("c",), 0, 1) == [0, 0] and lower.find(("d",), 0, 1) == [0, 1]
    read(lower, ["b"])
    lower.unpin(["a", "b"])
    lower.store(["e"])
    assert lower.find(("b",), 0, 1) == [1, 0] and lower.find(("a",), 0, 1) == [0, 1], "b was used while it was pinned"


def test_least_recently_used_forgets_what_heat_keeps():
    for eviction, kept in (("heat", 1), ("lru", 0)):
        lower = tiers(4, eviction=eviction)
        lower.store(["hot"])
        read(lower, ["hot"])
        lower.store([f"cold{i}" for i in range(12)])
        assert lower.find(("hot",), 0, 1) == [kept]


def test_a_page_cools_with_the_uses_of_others_and_then_leaves():
    for decay, gone in ((None, "is"), (8, "was")):
        lower = tiers(2, decay_uses=decay)
        lower.store(["was", "is"])
        read(lower, ["was"] * 7)
        read(lower, ["is"] * 2)
        lower.store(["new"])
        assert lower.find((gone,), 0, 1) == [0], "7 against 2, or 3 against 2, which is about as hot"


def test_what_is_hot_enough_is_pinned_until_it_has_cooled():
    lower = tiers(1, pin_at=2, decay_uses=3)
    lower.store(["a"])
    read(lower, ["a", "a"])
    lower.store(["b"])
    assert lower.find(("a",), 0, 1) == [1] and lower.forgotten == 1
    read(lower, ["a"])  # the third use: all halve, to 1, and a is at 2 again
    lower.store(["b"])
    assert lower.find(("a",), 0, 1) == [1]
    lower.eviction._cool()  # to 1
    lower.store(["b"])
    assert lower.find(("b",), 0, 1) == [1]


@pytest.mark.parametrize("eviction", ["lru", "heat"])
def test_what_a_step_reads_back_is_there_until_it_has_been_read(eviction):
    lower = tiers(2, eviction=eviction)
    lower.store(["hot", "a"])
    read(lower, ["hot"] * 5)
    lower.load(["a"])
    lower.store(["b", "c"])
    assert lower.find(("a",), 0, 1) == [1]
    lower.landed()
    lower.store(["d"])
    assert lower.find(("d",), 0, 1) == [1] and len(lower._pages[0]) == 2


def test_heat_saturates_and_halves_for_all():
    lower = tiers(4)
    lower.store(["a", "b"])
    read(lower, ["b"] * 9)
    read(lower, ["a"] * HOTTEST)
    assert (lower.eviction.heat("a"), lower.eviction.heat("b")) == (HOTTEST, 9)
    read(lower, ["a"])
    assert (lower.eviction.heat("a"), lower.eviction.heat("b")) == (HOTTEST // 2 + 1, 4)


OPERATIONS = st.lists(st.tuples(st.sampled_from(["store", "store", "load", "pin", "unpin"]), st.integers(0, 12)), max_size=150)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(OPERATIONS, st.integers(1, 5), st.integers(1, 5), st.sampled_from(["lru", "heat"]), st.sampled_from([None, 5, 40]), st.sampled_from([None, 1, 4]))
def test_pinned_pages_never_leave_their_tier_and_heat_stays_within_its_bounds(operations, first, second, eviction, decay, pin_at):
    options = {"decay_uses": decay, "pin_at": pin_at} if eviction == "heat" else {}
    lower, pinned = tiers(first, second, eviction=eviction, **options), set()
    uses: dict[int, int] = {}

    def places(key: int) -> list[bool]:
        return [key in pages for pages in lower._pages]

    for kind, key in operations:
        before = {one: places(one) for one in pinned}
        if kind == "load":
            if not any(places(key)):
                continue
            read(lower, [key] * 7)
            uses[key] = uses.get(key, 0) + 7
        elif kind == "store":
            lower.store([key])
        else:
            getattr(lower, kind)([key])
            (pinned.add if kind == "pin" else pinned.discard)(key)
        lower.check()
        for one, where in before.items():
            if one in pinned:
                assert all(now or not then for then, now in zip(where, places(one))), f"pinned page {one} left"
        if eviction == "heat":
            assert all(0 <= lower.eviction.heat(one) <= min(HOTTEST, uses.get(one, 0)) for one in range(13))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=120), st.integers(1, 6), st.sampled_from([None, 3, 11]))
def test_the_coldest_level_goes_first_and_in_it_the_oldest(operations, blocks, decay):
    """Against heat kept page by page and a list in order of use."""
    lower, order, heat, uses = tiers(blocks, decay_uses=decay), [], dict.fromkeys(range(10), 0), 0
    for stores, key in operations:
        if not stores and key not in order:
            continue
        if not stores:
            read(lower, [key])
            uses += 1
            if decay is not None and uses % decay == 0:
                heat = {one: value // 2 for one, value in heat.items()}
                order.sort(key=lambda one: heat[one].bit_length() == 0 and bits[one])  # those that came down stand behind those that were cold
            heat[key] += 1
        else:
            lower.store([key])
            if key not in order and len(order) == blocks:
                gone = min(order, key=lambda one: heat[one].bit_length())
                order.remove(gone)
                heat[gone] = 0
        if key in order:
            order.remove(key)
        order.append(key)
        bits = {one: value.bit_length() for one, value in heat.items()}
        assert lower._pages[0] == set(order)


def test_options_of_heat_are_checked():
    for options in ({"decay_uses": 0}, {"pin_at": 3}, {"pin_at": 256}):
        with pytest.raises(InputError):
            Heat(**options)


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


def test_heat_keeps_what_many_want_where_a_scan_would_push_it_out():
    heat, lru = (simulate(load("page-heat", ["workload.requests=700", f"kv_cache.eviction={name}"]), saturated_rps=1.0).summary for name in ("heat", "lru"))
    assert heat["prefix_cache_hit_rate"] > 1.1 * lru["prefix_cache_hit_rate"]
    assert heat["ttft_s"]["mean"] < lru["ttft_s"]["mean"]


@pytest.mark.parametrize("eviction", ["lru", "heat"])
def test_a_page_costs_no_more_to_take_in_however_large_the_tier_that_is_full(eviction):
    def spent_s(blocks: int) -> float:
        lower = tiers(blocks, eviction=eviction)
        lower.store(range(blocks))
        start_s = time.process_time()
        lower.store(range(blocks, blocks + 60_000))
        return time.process_time() - start_s

    assert spent_s(100_000) < 4 * spent_s(400), "looking for the oldest page must not pass those that left"
