"""Pools at the edge, in the region and at the centre: where a request is served, what the way costs, and that nobody is lost on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from drivers import request

from serving.errors import InputError
from serving.policies import load as load_policy
from serving.scenario import from_mapping
from sim.run import simulate
from sim.sites import Entrances

EDGE = {"name": "a", "tier": "edge", "users": 3, "inward": "r", "uplink": {"round_trip_s": 0.01, "bytes_per_s": 1e8}}
OTHER = {"name": "b", "tier": "edge", "users": 1, "inward": "r", "uplink": {"round_trip_s": 0.03, "bytes_per_s": 1e8}}
REGION = {"name": "r", "tier": "regional", "inward": "c", "uplink": {"round_trip_s": 0.08, "bytes_per_s": 1e9}}
CENTRE = {"name": "c", "tier": "central", "replicas": 2}
PLACES = [EDGE, OTHER, REGION, CENTRE]


def scenario(routing="nearest", places=PLACES, rate=30.0, requests=300, cluster=None, workload=None, bytes_per_token=5.0, **changes):
    work = {"requests": requests, "arrivals": {"process": "poisson", "rate_rps": rate}, "prompt_tokens": {"dist": "uniform", "min": 16, "max": 600},
            "output_tokens": {"dist": "uniform", "min": 2, "max": 40}, **(workload or {})}  # fmt: skip
    sites = {"places": places, "routing": routing, "bytes_per_token": bytes_per_token}
    return from_mapping({"name": "x", "llm": "qwen2.5-0.5b", "max_model_len": 4096, "cluster": cluster or {"gpu": "h100-sxm"}, "sites": sites,
                         "workload": work, **changes})  # fmt: skip


def served(summary: dict) -> dict[str, int]:
    return {row["name"]: row["requests"] for row in summary["sites"]["places"]}


def test_the_way_costs_its_round_trips_and_its_bytes():
    """One user's request now and then: at the centre its first token comes later by exactly what the links take."""
    alone = {"prompt_tokens": {"dist": "constant", "value": 1000}, "arrivals": {"process": "constant", "rate_rps": 0.5}}
    places = [EDGE, REGION, {**CENTRE, "replicas": 1}]
    near, far = (
        simulate(scenario(routing, places, workload=alone, requests=20, bytes_per_token=1e4)).summary for routing in ("nearest", "innermost")
    )
    way_s = 0.01 + 0.08 + 1e7 / 1e8  # both round trips, and ten megabytes at the rate of the narrower link
    assert far["ttft_s"]["mean"] - near["ttft_s"]["mean"] == pytest.approx(way_s, rel=1e-3)
    assert far["sites"]["network_s"]["max"] == pytest.approx(way_s, rel=1e-6)
    assert served(near) == {"a": 20, "r": 0, "c": 0} and served(far) == {"a": 0, "r": 0, "c": 20}


def test_what_crosses_a_link_together_shares_it():
    burst = {"prompt_tokens": {"dist": "constant", "value": 1000}, "arrivals": "all_at_once"}
    summary = simulate(scenario("innermost", [EDGE, REGION, CENTRE], workload=burst, requests=10, bytes_per_token=1e4)).summary
    assert summary["sites"]["network_s"]["max"] == pytest.approx(0.09 + 10 * 1e7 / 1e8, rel=1e-6)


@pytest.mark.parametrize(
    "routing", ["nearest", "innermost", {"name": "spill_over", "max_waiting": 0.5}, {"name": "by_length", "limits": {"edge": 200, "regional": 400}}, {"name": "quickest", "waiting_s": {"edge": 0.05, "regional": 0.01, "central": 0.0}}]
)
def test_nobody_is_lost_between_sites_and_fast_equals_stepwise(routing):
    asked = scenario(routing, rate=200.0)
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0}
    assert fast["requests"]["completed"] == sum(served(fast).values()) == 300


def test_users_enter_by_weight_and_sessions_stay():
    spec = scenario().sites
    entrances = Entrances(spec, 7)
    at = [entrances.of(request(i, 0.0, 10)) for i in range(4000)]
    assert set(at) == {0, 1} and at.count(0) / 4000 == pytest.approx(0.75, abs=0.03)
    talk = [entrances.of(request(i, 0.0, 10)._replace(session=5)) for i in range(50)]
    assert len(set(talk)) == 1


def test_the_edge_spills_only_what_it_has_no_room_for():
    calm = simulate(scenario({"name": "spill_over", "max_waiting": 4}, rate=5.0)).summary
    assert served(calm)["r"] == served(calm)["c"] == 0
    burst = simulate(scenario({"name": "spill_over", "max_waiting": 4}, workload={"arrivals": "all_at_once"})).summary
    assert all(count > 0 for count in served(burst).values())
    by_name = {row["name"]: row for row in burst["sites"]["places"]}
    assert by_name["c"]["from_outside"] == by_name["c"]["requests"] and by_name["a"]["from_outside"] == 0


def test_what_a_site_cannot_hold_goes_further_in():
    places = [{**EDGE, "max_model_len": 300}, REGION, CENTRE]
    summary = simulate(scenario("nearest", places, workload={"max_output_tokens": 40})).summary
    counts = served(summary)
    assert counts["a"] and counts["r"] and not counts["c"] and summary["requests"]["completed"] == 300


def test_a_place_without_replicas_only_passes_on():
    summary = simulate(scenario("nearest", [{**EDGE, "replicas": 0}, OTHER, REGION, CENTRE])).summary
    assert set(served(summary)) == {"b", "r", "c"} and served(summary)["r"] > served(summary)["b"] > 0


def test_stages_stand_where_users_enter_and_the_longer_prompt_decides():
    stages = [{"name": "retrieval", "service_s": {"dist": "constant", "value": 0.01}, "adds_tokens": {"dist": "constant", "value": 700}}]
    summary = simulate(scenario({"name": "by_length", "limits": {"edge": 650}}, stages=stages)).summary
    assert served(summary)["a"] == served(summary)["b"] == 0 and served(summary)["r"] == 300
    assert summary["stages"][0]["servers"] == 2 and summary["stages"][0]["requests"] == 300


# -- policies -----------------------------------------------------------------------------------------------------------


def way(*waiting: int, replicas=(1, 2, 4)):
    return SimpleNamespace(levels=["edge", "regional", "central"], replicas=replicas, round_trip_s=[0.0, 0.01, 0.1], waiting=lambda at: waiting[at])


def test_policies_on_a_written_down_way():
    one = request(1, 0.0, 1000)
    assert load_policy("site", "nearest").serve_at(one, way()) == 0
    assert load_policy("site", "innermost").serve_at(one, way()) == 2
    spill = load_policy("site", "spill_over", {"max_waiting": 2})
    assert [spill.serve_at(one, way(*waiting)) for waiting in ((1, 0, 0), (2, 3, 0), (2, 4, 99))] == [0, 1, 2]
    by_length = load_policy("site", "by_length", {"limits": {"edge": 999, "regional": 1000}})
    assert by_length.serve_at(one, way()) == 1 and by_length.serve_at(request(2, 0.0, 1001), way()) == 2
    by_class = load_policy("site", "by_class", {"tiers": {"batch": "central"}, "default": "regional"})
    assert by_class.serve_at(one._replace(class_name="batch"), way()) == 2 and by_class.serve_at(one, way()) == 1
    assert load_policy("site", "by_class", {"tiers": {"batch": "central"}}).serve_at(one, way()) == 0


def test_the_quickest_site_by_hand():
    """A prompt of 1,000 tokens costs 0.1 s at the edge, 0.02 s further in; the round trips are 0.01 and 0.1 s."""
    policy = load_policy("site", "quickest", {"token_s": {"edge": 1e-4, "regional": 2e-5, "central": 2e-5}, "waiting_s": 0.02})
    long, short = request(1, 0.0, 1000), request(2, 0.0, 50)
    assert policy.serve_at(long, way(0, 0, 0)) == 1 and policy.serve_at(short, way(0, 0, 0)) == 0
    assert policy.serve_at(short, way(1, 0, 0)) == 1, "0.025 s at the edge, 0.011 s in the region"
    assert policy.serve_at(short, way(9, 20, 0)) == 2, "ten wait for each of two replicas there: 0.211 s against 0.101"
    with pytest.raises(InputError) as caught:
        load_policy("site", "quickest", {"token_s": {"edge": -1.0}})
    assert caught.value.where == "policy.site.token_s.edge"


# -- releases -----------------------------------------------------------------------------------------------------------


def test_a_release_by_region_touches_that_region_alone():
    places = [{**EDGE, "replicas": 2}, OTHER, {**REGION, "replicas": 2}, CENTRE]
    stages = [{"name": "half", "share": 0.5, "for_s": 8}]
    rollout = {"candidate": {"step_time_factor": 3.0}, "regions": ["a"], "least": 10, "stages": stages}
    summary = simulate(scenario("nearest", places, requests=600, rollout=rollout)).summary
    release, entered = summary["rollout"], served(summary)
    assert release["outcome"] == "rolled_back"
    assert sum(row["outcomes"] for row in release["variants"].values()) == entered["a"] < 600
    assert 0 < release["stages"][0]["candidate"]["outcomes"] < entered["a"] / 2
    everywhere = simulate(scenario("nearest", places[:1] + places[2:], requests=600, rollout={**rollout, "regions": ["r"]})).summary
    assert sum(row["outcomes"] for row in everywhere["rollout"]["variants"].values()) == 600


# -- mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "changes", "where"),
    [
        ([{**EDGE, "inward": "rr"}, REGION, CENTRE], {}, "sites.places[0].inward"),
        ([EDGE, {**REGION, "inward": "a"}], {}, "sites.places[0].inward"),
        ([EDGE, {**REGION, "name": "a"}], {}, "sites.places[1].name"),
        ([{**EDGE, "uplink": None}, REGION, CENTRE], {}, "sites.places[0].inward"),
        ([{**EDGE, "replicas": 0}, {**REGION, "replicas": 0}, {**CENTRE, "replicas": 0}], {}, "sites.places[0].users"),
        ([CENTRE], {}, "sites"),
        (PLACES, {"routing": {"name": "by_length", "limits": {"edgee": 10}}}, "sites.routing"),
        (PLACES, {"routing": "nearst"}, "sites.routing"),
        (PLACES, {"cluster": {"gpu": "h100-sxm", "replicas": 2}}, "scenario"),
        (PLACES, {"rollout": {"candidate": {}, "regions": ["x"], "stages": [{"name": "s", "share": 0.5, "for_s": 1}]}}, "rollout.regions[0]"),
        (PLACES, {"rollout": {"candidate": {}, "stages": [{"name": "s", "share": 0.5, "for_s": 1}]}}, "sites.places[0].replicas"),
    ],
)
def test_a_mistake_names_its_place(places, changes, where):
    with pytest.raises(InputError) as caught:
        simulate(scenario(places=places, **changes))
    assert caught.value.where.endswith(where)


def test_the_nearest_name_is_told():
    with pytest.raises(InputError, match="did you mean 'r'"):
        scenario(places=[{**EDGE, "inward": "rr"}, REGION, CENTRE])
