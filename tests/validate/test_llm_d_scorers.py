"""The endpoint picker's scorers, and the measured ladder's requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from serving.request import Request
from validate.measured import routing_ladder
from validate.measured.scorers import Scored


class Pods:
    """What the picker reads of its pods."""

    def __init__(self, waiting: list[int], kv: list[float] | None = None, cached: list[int] | None = None) -> None:
        self._waiting, self._kv, self._cached = waiting, kv or [0.0] * len(waiting), cached or [0] * len(waiting)
        self.now_s, self.outstanding_tokens = 0.0, [0] * len(waiting)

    def waiting(self, pod: int) -> int:
        return self._waiting[pod]

    def kv_use(self, pod: int) -> float:
        return self._kv[pod]

    def cached_blocks(self, pod: int, keys: tuple) -> int:
        return self._cached[pod]


def asked(group: str = "a", blocks: int = 10) -> Request:
    return Request(0, 0.0, 64 * blocks, 10, prefix_hashes=tuple((group, block) for block in range(blocks)))


def test_queue_and_cache_weigh_the_same():
    picker = Scored()
    assert picker.route(asked(), Pods([9, 3, 0])) == 2  # queue scores 0, 2/3, 1
    assert picker.route(asked(), Pods([0, 0, 0], [0.5, 0.2, 0.4])) == 1
    assert picker.route(asked(), Pods([4, 0, 2], [0.0, 0.9, 0.3])) == 2  # 0 + 1, 1 + 0.1, 0.5 + 0.7


def test_equals_are_drawn():
    picker, pods = Scored(), Pods([0, 0, 0, 0])
    assert {picker.route(asked(), pods) for _ in range(50)} == {0, 1, 2, 3}


def test_events_spread_the_prefix_scores_of_those_that_hold_anything():
    picker = Scored(prefix_weight=2.0)
    assert picker.route(asked(), Pods([0, 0, 0], cached=[0, 3, 0])) == 1
    assert picker.route(asked(), Pods([1, 0, 0], cached=[10, 8, 0])) == 0  # the one that holds less scores as if it held nothing
    assert picker.route(asked(), Pods([1, 0, 0], [0.9, 0.0, 0.0], [10, 8, 0])) == 0  # 2 + 0 + 0.1 against 0 + 1 + 1
    assert picker.route(asked(), Pods([1, 0, 5], cached=[8, 8, 0])) == 1


def test_belief_sticks_to_whoever_was_sent_the_prefix_first():
    picker = Scored(prefix_weight=2.0, believed_blocks=100, considered_blocks=4)
    assert picker.route(asked("a"), Pods([1, 0, 1])) == 1
    assert picker.route(asked("a"), Pods([0, 9, 0], [0.1, 0.9, 0.1])) == 1
    assert picker.route(asked("b"), Pods([1, 9, 0])) == 2


def test_belief_ends_with_its_memory():
    picker = Scored(prefix_weight=2.0, believed_blocks=8, considered_blocks=4)
    for group in ("a", "b", "c"):  # three groups of four blocks on one pod: the first is forgotten
        assert picker.route(asked(group), Pods([0, 9])) == 0
    assert picker.route(asked("a"), Pods([9, 0])) == 1
    assert picker.route(asked("b"), Pods([9, 0])) == 0


def test_the_ladder_sends_its_prompts_in_one_order_from_the_first_in_every_stage(data_dir):
    (ladder,) = routing_ladder.find(data_dir / "measured")
    arrivals, stages = routing_ladder._arrivals(ladder)
    assert [(rows.stop - rows.start) for rows in stages.values()] == [270, 630, 720, 600, 720, 720, 700, 720, 750, 1000]
    order = {rate: [each.request.prefix_hashes for each in arrivals[rows]] for rate, rows in stages.items()}
    assert order[3.0][:249] == order[20.0][:249] == order[20.0][249:498] and len(set(order[3.0][:249])) == 249
    times = np.array([each.request.arrival_s for each in arrivals])
    assert (np.diff(times) > 0).all()
    for rate, rows in stages.items():
        assert times[rows][-1] - times[rows][0] == pytest.approx((rows.stop - rows.start) / rate, rel=0.05)
    shared = {len(tuple(itertools.takewhile(lambda key: len(key) == 2, keys))) for keys in order[3.0]}
    assert shared == {8352 // 64}
