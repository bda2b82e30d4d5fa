"""Delta debugging: what is left still fails, and nothing of it can be left out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from validate.regress.shrink import shrink


def rows(count: int) -> list[dict]:
    return [{"arrival_s": float(i), "prompt_tokens": 100 + i, "output_tokens": 40, "priority": 1, "name": i} for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 49), min_size=1, max_size=4))
def test_exactly_the_culprits_remain(culprits):
    def fails(part):
        return culprits <= {row["name"] for row in part}

    assert {row["name"] for row in shrink(rows(50), fails)} == culprits


def test_sizes_shrink_too():
    def fails(part):
        return any(row["prompt_tokens"] >= 30 for row in part)

    assert shrink(rows(20), fails) == [{"arrival_s": 0.0, "prompt_tokens": 50, "output_tokens": 1, "name": 0}]


def test_budgets_are_counts_and_the_result_still_fails():
    calls = []

    def fails(part):
        calls.append(len(part))
        return len(part) >= 40

    left = shrink(rows(64), fails, attempts=10)
    assert len(calls) == 10 and 40 <= len(left) <= 64
    calls.clear()
    assert len(shrink(rows(64), fails, requests=200)) >= 40 and sum(calls) <= 200 + 64


def test_hashes_keep_their_prompt():
    row = {"arrival_s": 0.0, "prompt_tokens": 64, "output_tokens": 1, "hash_ids": [1, 2, 3, 4], "hash_tokens": 16}
    assert shrink([row], lambda part: "hash_ids" in part[0]) == [row]
