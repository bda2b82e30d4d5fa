"""A cache with a size and a time to live: against a plain list of what was put, and against the formula for one key."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.rng import stream
from serving.ttl_lru import TtlLru

OPERATIONS = st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 7), st.sampled_from([1.0, 2.0, 3.0, 9.0]), st.sampled_from([0.0, 0.5, 2.0])), max_size=60)


class Listed:
    """The same by the definition: a list in order of use, searched from end to end."""

    def __init__(self, capacity: float, ttl_s: float) -> None:
        self.capacity, self.ttl_s = capacity, ttl_s
        self.rows: list[tuple[int, float, float]] = []  # key, until when, bytes

    def get(self, key: int, now_s: float) -> bool:
        row = next((row for row in self.rows if row[0] == key), None)
        if row is None:
            return False
        self.rows.remove(row)
        if row[1] <= now_s:
            return False
        self.rows.append(row)
        return True

    def put(self, key: int, size: float, now_s: float) -> None:
        self.rows = [row for row in self.rows if row[0] != key]
        if size > self.capacity:
            return
        while sum(row[2] for row in self.rows) + size > self.capacity:
            self.rows.pop(0)
        self.rows.append((key, now_s + self.ttl_s, size))


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.sampled_from([1.0, 3.0, math.inf]), st.sampled_from([2.0, 6.0]))
def test_it_is_a_list_in_order_of_use(operations, ttl_s, capacity):
    cache, listed, now_s = TtlLru(capacity, ttl_s), Listed(capacity, ttl_s), 0.0
    for what, key, size, pause_s in operations:
        now_s += pause_s
        if what == "get":
            assert (cache.get(key, now_s) is not None) == listed.get(key, now_s)
        else:
            cache.put(key, True, size, now_s)
            listed.put(key, size, now_s)
        assert list(cache._entries) == [row[0] for row in listed.rows]
        assert cache.bytes == sum(row[2] for row in listed.rows) <= capacity


def test_a_look_up_makes_recent_but_not_younger():
    cache = TtlLru(2.0, 10.0)
    cache.put("a", 1, 1.0, 0.0)
    cache.put("b", 2, 1.0, 1.0)
    assert cache.get("a", 9.0) == 1
    cache.put("c", 3, 1.0, 9.0)
    assert cache.get("b", 9.0) is None and cache.evicted == 1, "b was the least recently used"
    assert cache.get("a", 10.0) is None and cache.expired == 1, "its time is up"
    assert cache.put("c", 4, 1.0, 12.0) and not cache.put("c", 5, 1.0, 40.0), "whether a live one was there"


def test_what_is_larger_than_all_of_it_is_not_kept_and_drops_what_it_replaces():
    cache = TtlLru(2.0)
    cache.put("a", 1, 1.0, 0.0)
    cache.put("a", 2, 3.0, 0.0)
    assert cache.get("a", 0.0) is None and len(cache) == 0 and cache.bytes == 0.0


@pytest.mark.parametrize("asks_per_life", [0.5, 3.0])
def test_one_key_is_found_as_often_as_the_formula_says(asks_per_life):
    """Poisson asks at rate r, kept for T from each miss: of 1 + rT asks one misses, so rT / (1 + rT) hit."""
    cache, n = TtlLru(1.0, asks_per_life), 40_000
    for now_s in np.cumsum(stream(3, "asks").exponential(1.0, n)).tolist():
        if cache.get("k", now_s) is None:
            cache.put("k", True, 1.0, now_s)
    expected = asks_per_life / (1 + asks_per_life)
    assert cache.hits / n == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / n))


@pytest.mark.parametrize(("capacity", "ttl_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, math.nan)])
def test_nonsense_is_refused(capacity, ttl_s):
    with pytest.raises(ValueError, match="positive"):
        TtlLru(capacity, ttl_s)
