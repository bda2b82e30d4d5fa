"""Requests that think: rounds continue what was kept, dropped branches leave no trace, the answer counts from the arrival."""

from __future__ import annotations

import itertools

import pytest

from serving.errors import InputError
from serving.scenario import load
from serving.workload import conversations
from sim.run import simulate


def sessions(*overrides: str, count: int = 40):
    scenario = load("reasoning", [f"workload.requests={count}", *overrides])
    return list(conversations(scenario.workload, seed=3, block_tokens=16, max_model_len=scenario.max_model_len, prefix_caching=True))


def test_rounds_continue_the_thoughts_before_them():
    for session in sessions("workload.reasoning.branches=1"):
        requests = [turn.arrival for turn in session.turns]
        assert len(requests) == 4 and [one.request.class_name for one in requests] == ["reasoning"] * 3 + ["default"]
        for (before, thought), (after, _) in itertools.pairwise(requests):
            asked = 32 if after.class_name == "reasoning" else 0
            assert after.prompt_tokens == before.prompt_tokens + thought + asked
            named = (*before.prefix_hashes, *((before.generated_hash_seed, block) for block in range(len(before.prefix_hashes), (before.prompt_tokens + thought) // 16)))
            assert after.prefix_hashes[: len(named)] == named
        assert [turn.from_start for turn in session.turns] == [False] * 3 + [True]


def test_dropped_branches_go_back_to_where_the_round_began():
    tries = 0
    for session in sessions("workload.reasoning.acceptance=0.0"):
        requests = [turn.arrival.request for turn in session.turns]
        assert len(requests) == 3 * 3 + 1
        for first in range(0, 9, 3):
            assert len({request.prompt_tokens for request in requests[first : first + 3]}) == 1
            tries += 1
    assert tries == 120


def test_ids_are_unique_and_everybody_fits():
    everything = [turn.arrival for session in sessions("max_model_len=6000") for turn in session.turns]
    assert [one.request.request_id for one in everything] == list(range(len(everything)))
    assert all(one.request.prompt_tokens + one.output_tokens <= 6000 for one in everything)


def run(*overrides: str) -> dict:
    return simulate(load("reasoning", ["workload.requests=40", *overrides]), saturated_rps=1.0).summary


def test_rounds_find_their_prefix_and_the_answer_waits_for_the_thinking():
    cached, again, plain = run(), run("kv_cache.prefix_caching=false"), run("workload.reasoning=null")
    assert cached["prefix_cache_hit_rate"] > 0.6
    assert cached["e2e_s"]["mean"] < again["e2e_s"]["mean"]
    assert cached["e2e_s"]["max"] > 3 * plain["e2e_s"]["max"], "counted from the arrival"


def test_a_trace_or_sessions_cannot_reason():
    with pytest.raises(InputError, match="reasoning cannot be combined"):
        run("workload.sessions={turns: {dist: constant, value: 2}}")
