"""Sessions: histories grow, keys of turns continue each other, and the longest sequence ends them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scenario import from_mapping
from serving.workload import Session, conversations


def sessions(block_tokens: int = 16, max_model_len: int = 4096, prefix_caching: bool = True, **workload: object) -> list[Session]:
    base = {
        "requests": 60,
        "arrivals": {"process": "poisson", "rate_rps": 1.0},
        "prompt_tokens": {"dist": "uniform", "min": 1, "max": 100},
        "output_tokens": {"dist": "uniform", "min": 1, "max": 60},
        "sessions": {"turns": {"dist": "uniform", "min": 1, "max": 9}, "think_s": {"dist": "exponential", "mean": 4.0}, "new_tokens": 20},
    }
    made = from_mapping({"name": "s", "llm": "x", "cluster": {"gpu": "y"}, "workload": {**base, **workload}})
    return list(conversations(made.workload, seed=8, block_tokens=block_tokens, max_model_len=max_model_len, prefix_caching=prefix_caching))


@settings(max_examples=30, deadline=None)
@given(block=st.sampled_from([1, 5, 16]), longest=st.integers(50, 600), requests=st.integers(1, 80), prefix=st.integers(0, 90))
def test_every_turn_says_all_that_was_said_before(block: int, longest: int, requests: int, prefix: int) -> None:
    extra = {"prefix": {"groups": 2, "tokens": prefix, "share": 0.7}} if prefix else {}
    made = sessions(block, longest, requests=requests, **extra)
    ids = [turn.arrival.request.request_id for session in made for turn in session.turns]
    assert ids == list(range(requests))
    assert [session.start_s for session in made] == sorted(session.start_s for session in made)
    for number, session in enumerate(made):
        history, cached = 0, ()
        for position, (arrival, gap_s, *_) in enumerate(session.turns):
            request = arrival.request
            assert request.session == number
            assert (gap_s > 0.0) == (position > 0)
            if position:
                assert request.prompt_tokens == history + 20
                assert request.prompt_tokens < longest
            assert arrival.output_tokens <= request.max_output_tokens
            keys = request.prefix_hashes
            assert len(keys) == request.prompt_tokens // block
            assert keys[: len(cached)] == cached
            history = request.prompt_tokens + arrival.output_tokens
            generated = range(request.prompt_tokens // block, history // block)
            cached = (*keys, *((request.generated_hash_seed, index) for index in generated))


def test_no_key_belongs_to_two_sessions_without_a_shared_prefix() -> None:
    made = sessions()
    owners: dict[object, int] = {}
    for number, session in enumerate(made):
        for turn in session.turns:
            for key in turn.arrival.request.prefix_hashes:
                assert owners.setdefault(key, number) == number


def test_new_tokens_default_to_prompt_tokens_and_caching_off_leaves_no_keys() -> None:
    made = sessions(prefix_caching=False, prompt_tokens=10, output_tokens=5, sessions={"turns": 3})
    assert [turn.arrival.request.prompt_tokens for turn in made[0].turns] == [10, 25, 40]
    assert {turn.arrival.request.prefix_hashes for session in made for turn in session.turns} == {()}
    assert {turn.arrival.request.generated_hash_seed for session in made for turn in session.turns} == {None}


def test_a_workload_without_sessions_is_sessions_of_one_turn() -> None:
    made = sessions(sessions=None)
    assert [len(session.turns) for session in made] == [1] * 60
    assert made[3].start_s == made[3].turns[0].arrival.request.arrival_s


def test_equal_seeds_give_equal_sessions() -> None:
    assert sessions() == sessions()
    assert sessions()[0].turns[0].arrival.request.arrival_s == pytest.approx(sessions()[0].start_s)
