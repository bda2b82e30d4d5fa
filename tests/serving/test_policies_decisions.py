"""Each scheduling policy does what its page says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from drivers import Case, Linear, request, serve

from serving.plan import Outcome, StepResult
from serving.policies import load
from serving.request import Arrival
from serving.sequence import DECODING


def submit(scheduler, *requests):
    """Submit at their arrival times."""
    return [scheduler.submit(one, one.arrival_s) for one in requests]


def decode_all(scheduler, sequences, now_s: float = 0.0) -> float:
    """Step until all ``sequences`` decode."""
    for _ in range(50):
        if all(seq.state == DECODING for seq in sequences):
            return now_s
        plan = scheduler.schedule(now_s)
        now_s += 0.01
        scheduler.commit(plan, StepResult(now_s))
    raise AssertionError("they never all decode")


# -- ordering -----------------------------------------------------------------------------------------------------------


def order(name: str, *requests, **options) -> list[int]:
    """Order in which a batch of one serves requests that all wait."""
    case = Case(max_batch_seqs=1, blocks=200).with_policy("ordering", name, **options)
    scheduler = case.scheduler()
    for one in requests:
        scheduler.submit(one, 100.0)
    served, now_s = [], 100.0
    while scheduler.has_work:
        plan = scheduler.schedule(now_s)
        served += [seq.request_id for seq in plan.admitted]
        now_s += 0.01
        scheduler.commit(plan, StepResult(now_s, [(seq, "stop") for seq in plan.completing]))
    return served


def test_fcfs_is_the_order_of_arrival_and_then_of_ids():
    assert order("fcfs", request(3, 1.0), request(1, 2.0), request(2, 1.0)) == [2, 3, 1]


def test_priority_is_class_then_arrival():
    requests = [request(1, 1.0, priority=2), request(2, 2.0, priority=0), request(3, 1.5, priority=0), request(4, 0.0, priority=1)]
    assert order("priority", *requests) == [3, 2, 4, 1]


def test_shortest_job_without_ageing_starves_and_with_it_is_bounded():
    long_one = request(0, 0.0, 200)
    later = [request(i, 0.1 * i, 20) for i in range(1, 9)]
    assert order("shortest_job", long_one, *later, ageing_tokens_per_s=0.0)[-1] == 0
    aged = order("shortest_job", long_one, *later, ageing_tokens_per_s=400.0)
    assert aged[: aged.index(0)] == [1, 2, 3, 4], "only those that arrive within (200 - 20) / 400 s pass it"


def test_cache_affinity_prefers_what_is_cached_within_its_bound():
    case = Case(max_batch_seqs=1, blocks=200).with_policy("ordering", "cache_affinity", max_passes=2)
    keys = tuple(("hot", i) for i in range(3))
    arrivals = [Arrival(request(0, 0.0, 50, prefix_hashes=keys), 1)]
    arrivals += [Arrival(request(1, 1.0, 50, prefix_hashes=keys), 30), Arrival(request(2, 1.001, 50), 1)]
    arrivals += [Arrival(request(i, 1.001 + i / 1000, 50, prefix_hashes=keys), 1) for i in range(3, 8)]
    scheduled = serve(case, arrivals).columns["scheduled_s"]
    assert sum(scheduled[3:] < scheduled[2]) == 1, "96 % of two passes, rounded down"


# -- priorities that evict ------------------------------------------------------------------------------------------------


def test_deadline_evicts_when_the_target_is_nearer_than_the_slack():
    case = Case(blocks=200, max_batch_seqs=2).with_policy("ordering", "priority", preempt="deadline", slack_s=0.2)
    scheduler = case.scheduler()
    now_s = decode_all(scheduler, submit(scheduler, request(0, priority=1), request(1, priority=1)))
    scheduler.submit(request(2, now_s, ttft_slo_s=0.5), now_s)
    scheduler.submit(request(3, now_s + 1e-9, ttft_slo_s=math.inf), now_s)
    plan = scheduler.schedule(now_s)
    assert not plan.preempted and plan.valid_until_s == now_s + 0.5 - 0.2
    scheduler.commit(plan, StepResult(now_s + 0.299))
    plan = scheduler.schedule(now_s + 0.299)
    assert not plan.preempted
    scheduler.commit(plan, StepResult(now_s + 0.301))
    plan = scheduler.schedule(now_s + 0.301)
    assert [seq.request_id for seq in plan.preempted] == [1] and [seq.request_id for seq in plan.admitted] == [2]


def test_none_never_evicts():
    case = Case(blocks=200, max_batch_seqs=1).with_policy("ordering", "priority", preempt="none")
    scheduler = case.scheduler()
    now_s = decode_all(scheduler, submit(scheduler, request(0, priority=1)))
    scheduler.submit(request(1, now_s, priority=0), now_s)
    assert not scheduler.schedule(now_s).preempted


# -- victims ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "expected"), [("latest", 3), ("lowest_priority", 1), ("least_progress", 2)])
def test_victims(victim, expected):
    case = Case(blocks=400, max_batch_tokens=512).with_policy("preemption", victim)
    scheduler = case.scheduler()
    submit(scheduler, request(0, 0.0, 64, priority=0), request(1, 0.1, 64, priority=2), request(2, 0.2, 32, priority=1), request(3, 0.3, 48))
    decode_all(scheduler, list(scheduler._live.values()))
    chosen = scheduler.policies.victim.choose(scheduler.running, None)
    assert chosen.request_id == expected
    for priority, among in ((0, {1, 2}), (1, {1}), (2, set())):
        beneficiary = SimpleNamespace(request=request(9, priority=priority))
        chosen = scheduler.policies.victim.choose(scheduler.running, beneficiary)
        assert (chosen.request_id in among) if among else chosen is None


# -- batching -----------------------------------------------------------------------------------------------------------


def test_chunked_prefill_mixes_chunks_with_decodes():
    scheduler = Case(blocks=200, max_batch_tokens=64).scheduler()
    now_s = decode_all(scheduler, submit(scheduler, request(0, 0.0, 30)))
    submit(scheduler, request(1, now_s, 100))
    plan = scheduler.schedule(now_s)
    assert (plan.decodes, plan.chunks) == (1, [(63, 0)])
    scheduler.commit(plan, StepResult(now_s + 0.01))
    plan = scheduler.schedule(now_s + 0.01)
    assert (plan.decodes, plan.chunks, plan.logits_rows) == (1, [(37, 63)], 2)


def test_prefill_first_stalls_the_decodes():
    scheduler = Case(blocks=200, max_batch_tokens=64).with_policy("batching", "prefill_first").scheduler()
    now_s = decode_all(scheduler, submit(scheduler, request(0, 0.0, 30)))
    submit(scheduler, request(1, now_s, 100))
    seen = []
    for step in range(3):
        plan = scheduler.schedule(now_s + 0.01 * step)
        seen.append((plan.decodes, list(plan.chunks)))
        scheduler.commit(plan, StepResult(now_s + 0.01 * (step + 1)))
    assert seen == [(0, [(64, 0)]), (0, [(36, 64)]), (2, [])]


def test_whole_prompt_never_cuts_one_that_fits_the_budget():
    scheduler = Case(blocks=200, max_batch_tokens=64).with_policy("batching", "whole_prompt").scheduler()
    submit(scheduler, request(0, 0.0, 40), request(1, 0.0, 30), request(2, 0.0, 34), request(3, 0.0, 100))
    seen = []
    for step in range(4):
        plan = scheduler.schedule(0.01 * step)
        seen.append((plan.decodes, list(plan.chunks)))
        scheduler.commit(plan, StepResult(0.01 * (step + 1)))
    assert seen == [(0, [(40, 0)]), (1, [(30, 0), (34, 0)]), (3, [(64, 0)]), (3, [(36, 64)])]


# -- windows ------------------------------------------------------------------------------------------------------------


def batch(now_s: float, waiting: int, since_s: float) -> SimpleNamespace:
    """What a window sees of the batch."""
    return SimpleNamespace(now_s=now_s, waiting=waiting, waiting_since_s=since_s)


def outcome(ttft_s: float, priority: int = 0, scheduled_s: float = 0.0) -> Outcome:
    """A request that arrived at zero."""
    return Outcome("default", priority, 0.0, scheduled_s, ttft_s, ttft_s + 1, 10, 10, 0, "stop")


def test_the_fixed_window_opens_by_time_or_by_size():
    window = load("window", "fixed", {"window_s": 0.05, "size": 3})
    assert window.open_s(batch(1.0, 2, 0.99)) == 0.99 + 0.05
    assert window.open_s(batch(1.0, 3, 0.99)) == 1.0
    assert load("window", "none").open_s(batch(1.0, 1, 1.0)) == 1.0


def test_a_window_collects_requests_and_then_admits_them_together():
    case = Case(blocks=200, latency=Linear(0.001, 0.0, 0.0, 0.0)).with_policy("window", "fixed", window_s=0.05, size=4)
    arrivals = [Arrival(request(i, 1.0 + 0.01 * i), 1) for i in range(3)] + [Arrival(request(3 + i, 2.0 + 0.01 * i), 1) for i in range(4)]
    scheduled = serve(case, arrivals).columns["scheduled_s"]
    assert scheduled.tolist() == [1.05] * 3 + [2.03] * 4


def test_qos_adaptive_halves_above_three_times_the_target_and_grows_by_four_below_half():
    window = load("window", "qos_adaptive", {"start": 16, "smallest": 3, "largest": 20, "target": 0.1, "period": 10, "weights": (1.0,), "slo_s": (0.1,)})
    sizes = []
    for late in (4, 4, 4, 4, 2, 1, 0, 0, 0, 0, 0, 0):
        for i in range(10):
            window.observe(outcome(0.2 if i < late else 0.05))
        sizes.append(window.window)
    assert sizes == [8, 4, 3, 3, 3, 3, 7, 11, 15, 19, 20, 20]
    assert window.open_s(batch(5.0, 19, 4.99)) == 4.99 + window.max_wait_s and window.open_s(batch(5.0, 20, 4.99)) == 5.0


def test_qos_adaptive_weighs_classes_by_priority_and_counts_those_without_a_token():
    options = {"start": 16, "target": 0.2, "period": 2, "weights": (3.0, 1.0), "slo_s": (0.1, 0.1)}
    urgent, relaxed = load("window", "qos_adaptive", options), load("window", "qos_adaptive", options)
    for window, late in ((urgent, 0), (relaxed, 7)):
        window.observe(outcome(math.nan, priority=late))
        window.observe(outcome(0.01, priority=7 - late))
    assert (urgent.window, relaxed.window) == (8, 16), "3/4 of the weight is late, or 1/4: within three times the target"


def test_rtt_adaptive_follows_the_median_round_trip_within_its_bounds():
    window = load("window", "rtt_adaptive", {"shortest_s": 0.05, "longest_s": 0.2, "samples": 5})
    assert window.window_s == 0.05
    for trip_s, expected_s in ((0.1, 0.1), (0.12, 0.12), (0.9, 0.12), (0.9, 0.2), (0.01, 0.12), (0.01, 0.12), (0.01, 0.05)):
        window.observe(outcome(1.0 + trip_s, scheduled_s=1.0))
        assert window.window_s == pytest.approx(expected_s)
    window.observe(outcome(math.nan))
    assert window.window_s == 0.05, "a request without a token tells nothing"


# -- admission ----------------------------------------------------------------------------------------------------------


def test_fits_names_the_limit():
    scheduler = Case(blocks=5).with_policy("admission", "fits", max_queue=2).scheduler()
    assert scheduler.submit(request(0, prompt=65), 0.0) == "kv_capacity"
    assert scheduler.submit(request(1, cap=0), 0.0) == "max_model_len"
    assert not isinstance(scheduler.submit(request(2, prompt=64), 0.0), str)
    scheduler.submit(request(3), 0.0)
    assert scheduler.submit(request(4), 0.0) == "max_queue"


def test_always_takes_everything_in():
    scheduler = Case(blocks=5).with_policy("admission", "always").scheduler()
    assert not isinstance(scheduler.submit(request(0, prompt=65), 0.0), str)
    plan = scheduler.schedule(0.0)
    assert [seq.request_id for seq in plan.ended] == [0] and plan.empty


def test_the_token_bucket_fills_at_its_rate_up_to_the_burst():
    scheduler = Case(blocks=500).with_policy("admission", "token_bucket", tokens_per_s=100.0, burst_tokens=200.0).scheduler()

    def take(request_id: int, now_s: float, prompt: int) -> bool:
        return scheduler.submit(request(request_id, now_s, prompt), now_s) != "token_bucket"

    assert take(0, 0.0, 150) and not take(1, 0.0, 51) and take(2, 0.0, 50)
    assert not take(3, 0.99, 100) and take(4, 1.0, 100), "100 tokens come back in a second, refusals take none"
    assert not take(5, 100.0, 201) and take(6, 100.0, 200), "never more than the burst"
