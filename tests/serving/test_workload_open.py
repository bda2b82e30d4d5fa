"""The stream of requests: order, classes, caps, prefixes, reproducibility and cost."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InputError
from serving.request import Arrival, Request
from serving.scenario import Scenario, from_mapping
from serving.workload import conversations, follows_answers, open_arrivals

POISSON = {"process": "poisson", "rate_rps": 10.0}


def scenario(slo: dict | None = None, **workload: object) -> Scenario:
    base = {"requests": 500, "arrivals": POISSON, "prompt_tokens": {"dist": "lognormal", "median": 100, "sigma": 1.0}, "output_tokens": 30}
    return from_mapping({"name": "s", "llm": "x", "cluster": {"gpu": "y"}, "workload": {**base, **workload}, "slo": slo or {}})


def arrivals(slo: dict | None = None, *, seed: int = 3, max_model_len: int = 4096, prefix_caching: bool = True, **workload: object) -> list[Arrival]:
    made = scenario(slo, **workload)
    return list(
        open_arrivals(made.workload, seed=seed, block_tokens=16, max_model_len=max_model_len, prefix_caching=prefix_caching, slo=made.slo)
    )


def test_requests_are_in_order_with_ids_from_zero() -> None:
    made = arrivals(requests=9000)
    assert [each.request.request_id for each in made] == list(range(9000))
    instants = [each.request.arrival_s for each in made]
    assert instants == sorted(instants)
    assert {type(each) for each in made} == {Arrival}
    assert {type(each.request) for each in made} == {Request}
    assert {type(value) for value in made[0].request[:4]} == {int, float}


def test_count_and_duration_bound_the_stream_whichever_comes_first() -> None:
    timed = arrivals(requests=None, duration_s=50.0)
    assert len(timed) == pytest.approx(500, abs=4 * math.sqrt(500))
    assert timed[-1].request.arrival_s < 50.0
    assert timed == arrivals(requests=100_000, duration_s=50.0)
    assert len(arrivals(requests=7, duration_s=50.0)) == 7


def test_equal_seeds_give_equal_requests_and_other_seeds_do_not() -> None:
    assert arrivals() == arrivals()
    assert arrivals() != arrivals(seed=4)


def test_a_change_in_one_part_leaves_the_others_as_they_were() -> None:
    plain = arrivals()
    classes = [{"name": "a", "share": 1}, {"name": "b", "share": 2}]
    changed = arrivals(output_tokens=77, classes=classes, prefix={"groups": 3, "tokens": 32}, tenants=[{"name": "t"}, {"name": "u"}])
    assert [each.request.arrival_s for each in plain] == [each.request.arrival_s for each in changed]
    assert [each.request.prompt_tokens for each in plain] == [each.request.prompt_tokens for each in changed]


def test_classes_and_tenants_have_their_shares_priorities_and_objectives() -> None:
    classes = [{"name": "hot", "share": 1, "priority": -1}, {"name": "cold", "share": 3, "priority": 5, "output_tokens": 3, "max_output_tokens": 2}]
    tenants = [{"name": "t", "share": 0.1}, {"name": "u", "share": 0.9}]
    slo = {"default": {"ttft_ms": 500}, "classes": {"hot": {"ttft_ms": 200}}}
    made = arrivals(slo, requests=8000, prompt_tokens=9, classes=classes, tenants=tenants)
    kinds = Counter((each.request.class_name, each.request.priority, each.request.ttft_slo_s) for each in made)
    assert set(kinds) == {("hot", -1, 0.2), ("cold", 5, 0.5)}
    assert kinds["hot", -1, 0.2] / 8000 == pytest.approx(0.25, abs=0.02)
    assert Counter(each.request.tenant for each in made)["t"] / 8000 == pytest.approx(0.1, abs=0.015)
    assert {(each.output_tokens, each.request.max_output_tokens) for each in made if each.request.class_name == "cold"} == {(2, 2)}
    assert {each.output_tokens for each in made if each.request.class_name == "hot"} == {30}


def test_the_cap_is_the_clients_or_the_largest_length_or_what_is_left() -> None:
    assert {each.request.max_output_tokens for each in arrivals(prompt_tokens=10)} == {30}
    capped = arrivals(prompt_tokens=10, max_output_tokens=20)
    assert {(each.request.max_output_tokens, each.output_tokens) for each in capped} == {(20, 20)}
    open_ended = arrivals(prompt_tokens=10, output_tokens={"dist": "exponential", "mean": 3}, max_model_len=100)
    assert {each.request.max_output_tokens for each in open_ended} == {90}
    too_long = arrivals(prompt_tokens=200, max_model_len=100)
    assert {(each.request.prompt_tokens, each.request.max_output_tokens) for each in too_long} == {(200, 1)}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1), cap=st.integers(1, 500), longest=st.integers(2, 3000), block=st.sampled_from([1, 7, 16]),
    groups=st.integers(1, 9), prefix=st.integers(1, 300), share=st.floats(0, 1), suffix=st.booleans(),
)  # fmt: skip
def test_invariants_of_every_request(seed: int, cap: int, longest: int, block: int, groups: int, prefix: int, share: float, suffix: bool) -> None:
    made = scenario(
        requests=60, max_output_tokens=cap, output_tokens={"dist": "exponential", "mean": 100},
        prefix={"groups": groups, "tokens": prefix, "share": share, "cache_suffix": suffix},
    )  # fmt: skip
    seen: dict[int, tuple] = {}
    for request, output in open_arrivals(made.workload, seed=seed, block_tokens=block, max_model_len=longest, prefix_caching=True):
        assert 1 <= output <= request.max_output_tokens <= cap
        assert request.prompt_tokens >= 1
        keys = request.prefix_hashes
        assert len(keys) <= request.prompt_tokens // block
        if suffix:
            assert len(keys) == request.prompt_tokens // block
        # Keys are chained: whoever shares a key shares all keys before it.
        for position, key in enumerate(keys):
            assert seen.setdefault(key, keys[: position + 1]) == keys[: position + 1]
        assert sum(key < 1 << 60 for key in keys) <= prefix // block


def test_prefix_groups_are_shared_by_popularity_and_only_when_cached() -> None:
    made = arrivals(requests=4000, prompt_tokens=100, prefix={"groups": 3, "tokens": 40, "zipf_exponent": 1.0, "share": 0.5})
    first = Counter(each.request.prefix_hashes[0] for each in made)
    shared = [count for key, count in first.most_common(3)]
    assert sum(shared) / 4000 == pytest.approx(0.5, abs=0.04)
    assert shared[0] / shared[2] == pytest.approx(3.0, rel=0.25)
    assert len(made[0].request.prefix_hashes) == 6
    assert {each.request.prefix_hashes for each in arrivals(prefix={"tokens": 40}, prefix_caching=False)} == {()}


def test_nothing_to_do_is_an_error_before_the_start() -> None:
    with pytest.raises(InputError, match="no request"):
        arrivals(requests=None, duration_s=1e-9)
    with pytest.raises(InputError, match="saturated"):
        arrivals(arrivals={"process": "poisson", "load_factor": 0.5})
    with pytest.raises(InputError, match="wait for answers"):
        arrivals(sessions={"turns": 3})


def test_closed_loop_leaves_the_times_to_its_users() -> None:
    loop = {"process": "closed_loop", "users": 3}
    assert follows_answers(scenario(arrivals=loop).workload)
    made = arrivals(arrivals=loop, requests=9)
    assert [each.request.arrival_s for each in made] == [0.0] * 9
    endless = scenario(arrivals=loop, requests=None, duration_s=1.0).workload
    arguments = {"seed": 1, "block_tokens": 16, "max_model_len": 99, "prefix_caching": True}
    assert len(list(islice(conversations(endless, **arguments), 10_000))) == 10_000


def test_a_request_costs_a_few_calls_of_a_function() -> None:
    """By ratio, so that a slow machine does not matter: against making the same tuples one call at a time."""

    def measure(work) -> float:
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            work()
            best = min(best, time.process_time() - start)
        return best

    made = scenario(requests=40_000).workload
    arguments = {"seed": 1, "block_tokens": 16, "max_model_len": 9999, "prefix_caching": True}
    stream = measure(lambda: sum(1 for _ in open_arrivals(made, **arguments)))
    calls = measure(lambda: [Arrival(Request(i, 0.1, 5, 6, 0, "default", "", None, (), None, 1.0), 3) for i in range(40_000)])
    assert stream < 2.0 * calls
