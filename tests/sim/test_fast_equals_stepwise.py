"""The fast path is exact: taken in runs or step by step, lazily or woken, a run's times, plans and metrics are the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drivers import Case, Linear, Served, random_aborts, random_arrivals, random_case, request, serve

from serving.errors import BrokenPolicyError
from serving.policies.batching.chunked_prefill import ChunkedPrefill
from serving.request import Arrival


def watch_nothing(request_id: int, time_s: float, status: str) -> None:
    """Its presence makes the replicas eager."""


def assert_same(one: Served, other: Served) -> None:
    """Compare part by part: a difference of the whole would print pages."""
    for name, left, right in zip(("requests", "summary", "gaps", "plans", "accounts"), one.comparable(), other.comparable()):
        assert left == right, name


@pytest.mark.parametrize("seed", range(48))
def test_one_replica(seed):
    case = random_case(seed)
    arrivals = random_arrivals(seed, case)
    aborts = random_aborts(seed, arrivals) if seed % 2 else []
    fast = serve(case, arrivals, aborts=aborts)
    assert_same(fast, serve(case, arrivals, aborts=aborts, stepwise=True))
    assert_same(fast, serve(case, arrivals, aborts=aborts, watch=watch_nothing))
    assert fast.summary["requests"]["arrived"] == len(arrivals)


@pytest.mark.parametrize("seed", range(100, 124))
def test_several_replicas_behind_a_router(seed):
    case = random_case(seed, replicas=2 + seed % 3)
    arrivals = random_arrivals(seed, case, requests=80)
    aborts = random_aborts(seed, arrivals) if seed % 3 == 0 else []
    fast = serve(case, arrivals, aborts=aborts)
    assert_same(fast, serve(case, arrivals, aborts=aborts, stepwise=True))
    assert_same(fast, serve(case, arrivals, aborts=aborts, watch=watch_nothing))


@pytest.mark.parametrize("seed", range(200, 208))
def test_long_decodes_on_few_sequences(seed):
    """Where runs are long: few requests, many tokens each, now and then an arrival in the middle of a run."""
    case = Case(blocks=300, max_batch_seqs=4)
    arrivals = [
        Arrival(arrival.request._replace(prompt_tokens=40, prefix_hashes=(), arrival_s=3.0 * arrival.request.request_id, max_output_tokens=4096), 700)
        for arrival in random_arrivals(seed, case, requests=12)
    ]
    fast, slow = serve(case, arrivals), serve(case, arrivals, stepwise=True)
    assert_same(fast, slow)
    assert fast.cluster.replicas[0].runs * 20 < slow.cluster.replicas[0].runs


@pytest.mark.parametrize("seed", range(300, 306))
def test_records_change_nothing(seed):
    case = random_case(seed, replicas=2)
    arrivals = random_arrivals(seed, case)
    with_records, without = serve(case, arrivals), serve(case, arrivals, record=False)
    assert with_records.summary == without.summary
    assert with_records.comparable()[0] == without.comparable()[0]


@pytest.mark.parametrize("seed", range(400, 412))
def test_an_audit_of_every_run_changes_nothing_for_honest_policies(seed):
    case = random_case(seed, replicas=1 + seed % 2)
    arrivals = random_arrivals(seed, case)
    plain = serve(case, arrivals)
    assert_same(plain, serve(case, arrivals, audit_share=1.0))
    assert_same(plain, serve(case, arrivals, audit_share=0.3, watch=watch_nothing))


@pytest.mark.parametrize("seed", range(500, 512))
def test_two_plans_in_flight_lazy_or_woken(seed):
    case = replace(random_case(seed, replicas=1 + seed % 2), max_in_flight=2)
    arrivals = random_arrivals(seed, case)
    assert_same(serve(case, arrivals), serve(case, arrivals, watch=watch_nothing))


class EveryFifth:
    """Promises that nothing will change, and yet admits only when the decode clock is a multiple of five."""

    def __init__(self) -> None:
        self._honest = ChunkedPrefill()

    def plan(self, batch):
        if batch.decodes and batch.scheduler.clock % 5:
            batch.continue_decodes()
            batch.valid_until(float("inf"))
        else:
            self._honest.plan(batch)


class ForgetsItsDeadline:
    """Runs decodes in batches of two from time 1.0 on, and does not say that it will."""

    def plan(self, batch):
        if not batch.decodes and batch.waiting:
            batch.admit()
        elif batch.now_s > 1.0 and len(batch.running) > 1:
            batch.preempt(batch.victim.choose(batch.running, None))
            batch.continue_decodes()
        elif batch.now_s <= 1.0 and batch.waiting and batch.admit() == "admitted":
            return
        else:
            batch.continue_decodes()
        batch.valid_until(float("inf"))


@pytest.mark.parametrize("liar", [EveryFifth, ForgetsItsDeadline])
@pytest.mark.parametrize("eager", [False, True])
def test_the_audit_names_a_policy_that_lies_and_the_step(liar, eager):
    case = Case(blocks=400).with_policy("batching", liar)
    arrivals = [Arrival(request(i, 0.013 * i, 32), 300) for i in range(12)]
    watch = watch_nothing if eager else None
    unaudited = serve(case, arrivals).comparable()
    assert unaudited != serve(case, arrivals, stepwise=True).comparable(), "the lie must matter, or there is nothing to catch"
    with pytest.raises(BrokenPolicyError, match=rf"{liar.__name__}, step \d+ at [\d.]+ s: promised at"):
        serve(case, arrivals, audit_share=1.0, watch=watch)


def test_look_ahead_only_limits_work(monkeypatch):
    case = Case(blocks=200, latency=Linear(context_token_s=3e-6))
    arrivals = [Arrival(request(i, 0.5 * i, 64), 400) for i in range(6)]
    far = serve(case, arrivals)
    monkeypatch.setattr("sim.replica.LOOK_AHEAD", 7)
    assert_same(far, serve(case, arrivals))
