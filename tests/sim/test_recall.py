"""Stages that remember: retrieval in three tiers, and outcomes by what was asked with a predictor before them."""

from __future__ import annotations

import pytest
from test_stages import WORKLOAD, scenario

from serving.errors import InputError
from serving.policies import load as load_policy
from serving.records import open_run
from sim.run import simulate
from validate.explain import attribute, timelines
from validate.run_data import read_run

QUERIES = {"queries": {"count": 200, "zipf_exponent": 1.0}}
TIER = {"capacity_bytes": 1e6, "entry_bytes": 100}
TIERS = {"answers": {**TIER, "ttl_s": 5.0}, "results": {**TIER, "ttl_s": 60.0}, "texts": TIER}
BUSY = {"requests": 800, "arrivals": {"process": "poisson", "rate_rps": 50.0}, **QUERIES}


def constant(value: float) -> dict:
    return {"dist": "constant", "value": value}


def retrieval(**tiers: object) -> dict:
    facts = {"documents": 500, "per_query": 3, "zipf_exponent": 0.8, "fetch_s": constant(0.05), "lookup_s": 0.001}
    return {"name": "retrieval", "service_s": constant(0.1), "servers": 8, "adds_tokens": {"dist": "constant", "value": 200}, "retrieval": facts | tiers}


def keyed(**changes: object) -> dict:
    return {"name": "features", "service_s": constant(0.1), "servers": 16, "cache": {**TIER, "lookup_s": constant(0.002), **changes}}


def run(stages: list[dict], workload: dict | None = None, **options: object) -> dict:
    return simulate(scenario(stages, BUSY | (workload or {})), **options).summary


def test_each_tier_saves_what_it_says(tmp_path):
    """One question, asked again and again, far apart: all that it takes is known to the microsecond."""
    apart = {"requests": 6, "arrivals": {"process": "constant", "rate_rps": 0.1}, "queries": {"count": 1}}
    simulate(scenario([retrieval(**{**TIERS, "answers": {**TIER, "ttl_s": 15.0}, "results": {**TIER, "ttl_s": 35.0}})], apart), out=tmp_path / "run")
    rows = open_run(tmp_path / "run").stages
    # Asked at 10, 20, ... s. The answer of 10 s serves 20 s and is too old at 30; results of 10 s serve 30 s and are too old at 50.
    assert rows["outcome"].tolist() == ["search", "answer", "results", "answer", "search", "answer"]
    took = (rows["ended_s"] - rows["entered_s"]).tolist()
    assert took == pytest.approx([0.151, 0.001, 0.001, 0.001, 0.101, 0.001])  # documents are fetched once and kept
    requests = open_run(tmp_path / "run").requests
    assert requests["replica"].tolist()[1::2] == [-1, -1, -1] and (requests["replica"][::2] >= 0).all()
    assert requests["output_tokens"][1] == requests["output_tokens"][0] and requests["output_tokens"][3] == requests["output_tokens"][2]
    assert requests["prompt_tokens"][0] > 200 and (requests["finish_s"] - requests["arrival_s"])[1] == pytest.approx(0.001)


def test_an_answer_serves_only_those_who_ask_after_it_was_given():
    together = {"requests": 20, "arrivals": "all_at_once", "queries": {"count": 1}}
    row = run([retrieval(**TIERS)], together)["stages"][0]
    assert row["retrieval"]["answers"]["hits"] == 0 and row["served"] == 20


def test_an_answer_given_before_has_been_through_what_comes_after_it():
    post = {"name": "post", "after_answer": True, "service_s": constant(0.2), "servers": 50}
    summary = run([retrieval(**TIERS), post])
    hits = summary["stages"][0]["retrieval"]["answers"]["hits"]
    assert hits > 50 and summary["stages"][1]["requests"] == 800 - hits
    assert summary["done_s"]["p50"] < summary["done_s"]["max"] and summary["done_s"]["mean"] > summary["e2e_s"]["mean"]


def test_every_tier_makes_it_faster_and_the_questions_stay_the_same():
    chosen = [{}, {"texts": TIER}, {"texts": TIER, "results": TIERS["results"]}, TIERS]
    summaries = [run([retrieval(**tiers)]) for tiers in chosen]
    times = [summary["stages"][0]["time_s"]["mean"] for summary in summaries]
    assert times[0] > times[1] > times[2] >= times[3]
    assert summaries[3]["ttft_s"]["mean"] < summaries[2]["ttft_s"]["mean"] < summaries[0]["ttft_s"]["mean"]
    found = [summary["stages"][0]["retrieval"] for summary in summaries]
    assert found[1]["texts"]["hits"] == found[2]["texts"]["hits"], "the same documents were wanted"
    asked_for = found[3]["answers"]["hits"] + found[3]["results"]["hits"] + summaries[3]["stages"][0]["served"]
    assert asked_for == 800 and all(summary["requests"]["completed"] == 800 for summary in summaries)


def test_more_room_never_finds_less():
    """Least recently used with equal entries and no time to live: what the smaller cache holds, the larger holds too."""
    hits = [run([retrieval(results={**TIER, "capacity_bytes": 100.0 * entries})])["stages"][0]["retrieval"]["results"]["hits"] for entries in (1, 10, 40, 200)]
    assert hits == sorted(hits) and hits[0] < hits[-1]


@pytest.mark.parametrize("workload", [{}, {"arrivals": {"process": "closed_loop", "users": 12}}])
@pytest.mark.parametrize("stages", [[retrieval(**TIERS)], [keyed(branch="predicted"), retrieval(**TIERS)]])
def test_fast_equals_stepwise_with_memory(stages, workload):
    fast, stepwise = run(stages, {"requests": 250, **workload}), run(stages, {"requests": 250, **workload}, stepwise=True)
    assert fast | {"events": 0} == stepwise | {"events": 0}
    assert fast["requests"]["completed"] == 250


def test_counts_are_those_of_the_records_and_explanations_add_up(tmp_path):
    row = run([retrieval(**TIERS)], out=tmp_path / "run")["stages"][0]
    outcomes = open_run(tmp_path / "run").stages["outcome"].value_counts().to_dict()
    tiers = row["retrieval"]
    assert outcomes == {"answer": tiers["answers"]["hits"], "results": tiers["results"]["hits"], "search": row["served"]}
    data = read_run(tmp_path / "run")
    found = attribute(data, "e2e_s", curves=timelines(data))
    assert found.parts_s.sum(axis=1) == pytest.approx(found.whole_s, abs=1e-9)


# -- stages by key ------------------------------------------------------------------------------------------------------


def test_a_hit_takes_the_look_up_and_a_miss_both(tmp_path):
    apart = {"requests": 3, "arrivals": {"process": "constant", "rate_rps": 0.1}, "queries": {"count": 1}}
    simulate(scenario([keyed(ttl_s=15.0)], apart), out=tmp_path / "run")
    rows = open_run(tmp_path / "run").stages
    assert rows["outcome"].tolist() == ["miss", "hit", "miss"]
    assert (rows["ended_s"] - rows["entered_s"]).tolist() == pytest.approx([0.102, 0.002, 0.102])


def test_the_predictor_looks_where_it_pays():
    """A slow look-up and few popular questions: looking always costs the unpopular, never costs the popular, predicting neither."""
    slow = {"lookup_s": constant(0.06), "ttl_s": 2.0}
    asked = {"queries": {"count": 5000, "zipf_exponent": 1.1}}
    times = {name: run([keyed(branch=name, **slow)], asked)["stages"][0]["time_s"]["mean"] for name in ("predicted", "always", "never")}
    assert times["predicted"] < times["always"] and times["predicted"] < times["never"]


def test_the_predictor_gives_up_on_a_cache_that_is_slow():
    row = run([keyed(branch="predicted", lookup_s=constant(0.3))], {"queries": {"count": 1}})["stages"][0]
    cache = row["cache"]
    assert cache["direct"] > 10 * (cache["hits"] + cache["misses"]) > 0, "it tries again now and then"


def test_the_predictor_by_hand():
    policy = load_policy("branch", "predicted", {"weight": 0.5, "slots": 4})
    assert not policy.cached(1)
    for _ in range(3):
        policy.observe(1, True, None)  # kept twice: it would have been there
    assert policy.cached(1) and policy.cached(5) and not policy.cached(2), "5 shares the slot of 1"
    policy.observe(1, False, 0.01)
    assert not policy.cached(1), "0.4375 is below 0.75"
    for _ in range(8):
        policy.observe(2, True, 0.1)
    assert [policy.cached(2) for _ in range(8)].count(True) < 8 and any(policy.cached(2) for _ in range(8)), "slow, then tried again"


@pytest.mark.parametrize(
    ("stages", "workload", "where"),
    [
        ([retrieval(answers={**TIER, "capacity_bytes": 99.0})], QUERIES, "stages[0].retrieval.answers.capacity_bytes"),
        ([retrieval(results={**TIER, "ttl_s": 0.0})], QUERIES, "stages[0].retrieval.results.ttl_s"),
        ([keyed(ttl_s=-1.0)], QUERIES, "stages[0].cache.ttl_s"),
        ([retrieval(per_query=0)], QUERIES, "stages[0].retrieval.per_query"),
        ([retrieval(per_query=100)], {"queries": {"count": 1_000_000}}, "stages[0].retrieval.per_query"),
        ([keyed(branch="predictd")], QUERIES, "stages[0].cache.branch"),
        ([keyed(branch={"name": "predicted", "hit_rate": 2.0})], QUERIES, "stages[0].cache.branch.hit_rate"),
        ([{**keyed(), **retrieval()}], QUERIES, "stages[0]"),
        ([keyed()], {}, "scenario"),
        ([keyed()], {"queries": {"count": 0}}, "workload.queries.count"),
    ],
)
def test_a_mistake_names_its_place(stages, workload, where):
    with pytest.raises(InputError) as caught:
        simulate(scenario(stages, WORKLOAD | workload))
    assert caught.value.where.endswith(where)
