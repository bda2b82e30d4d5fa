"""Back-pressure: a refusal says when to come back, clients do or give up, and each request is counted once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from changing_fleets import feed
from drivers import Case, Linear, build, random_arrivals, random_case, request
from test_dynamics_pools import build_pools

from serving.metrics import COMPLETED, REJECTED
from serving.plan import Outcome
from serving.policies import load
from serving.request import Arrival
from serving.scenario import from_mapping
from serving.scenario.workload import Retry
from sim.retries import Retries
from sim.run import simulate

FLAT = Linear(0.1, 0.0, 0.0, 0.0)


def serve_retrying(case: Case, arrivals: list[Arrival], spec: Retry, stepwise: bool = False):
    env, cluster, metrics = build(case, stepwise=stepwise)
    retries = Retries(cluster, spec, np.random.default_rng(4))
    feed(env, cluster, arrivals)
    env.run()
    cluster.drain()
    for replica in cluster.replicas:
        replica.scheduler.check()
    return metrics.columns(), retries


def bucket(rate: float, burst: float) -> dict:
    return {"admission": ("token_bucket", {"tokens_per_s": rate, "burst_tokens": burst})}


def test_a_client_comes_back_when_the_refusal_said_and_its_wait_counts_from_its_arrival():
    case = Case(latency=FLAT, policies=bucket(10.0, 100.0))
    columns, retries = serve_retrying(
        case, [Arrival(request(0, 1.0, 100), 2), Arrival(request(1, 1.0, 50), 2)], Retry(backoff_s=0.5, jitter=0.0)
    )
    assert columns["arrival_s"].tolist() == [1.0, 1.0]
    assert columns["first_token_s"].tolist() == pytest.approx([1.1, 6.1]), "5 s until 50 tokens are in the bucket"
    assert retries.report() == {"refusals": 1, "retries": 1, "gave_up": 0}


def test_pauses_grow_until_a_client_gives_up_and_what_never_fits_is_not_tried_again():
    case = Case(latency=FLAT, policies={"admission": ("fits", {"max_queue": 1})}, max_batch_seqs=1)
    long, waiting, third, huge = (request(0, 1.0), 200), (request(1, 1.05), 5), (request(2, 1.1), 5), (request(3, 1.2, 5000), 5)
    columns, retries = serve_retrying(
        case, [Arrival(*each) for each in (long, waiting, third, huge)], Retry(attempts=3, backoff_s=0.5, factor=2.0, jitter=0.0)
    )
    assert columns["status_code"].tolist() == [COMPLETED, COMPLETED, REJECTED, REJECTED]
    assert columns["finish_s"][2] == pytest.approx(1.1 + 0.5 + 1.0 + 2.0) and columns["finish_s"][3] == pytest.approx(1.2)
    assert retries.report() == {"refusals": 4, "retries": 3, "gave_up": 1}


@pytest.mark.parametrize("seed", range(12))
def test_each_request_is_recorded_once_however_often_it_was_refused(seed):
    case = random_case(seed, replicas=2).with_policy("admission", "token_bucket", tokens_per_s=400.0, burst_tokens=60.0)
    arrivals = random_arrivals(seed, case)
    runs = [serve_retrying(case, arrivals, Retry(attempts=2, backoff_s=0.05), stepwise=stepwise) for stepwise in (False, True)]
    columns, retries = runs[0]
    assert columns["request_id"].tolist() == [arrival.request.request_id for arrival in arrivals]
    assert columns["arrival_s"].tolist() == [arrival.request.arrival_s for arrival in arrivals]
    assert retries.waiting == 0
    for name, column in columns.items():
        assert np.array_equal(column, runs[1][0][name], equal_nan=name.endswith("_s")), name


def test_in_a_fleet_with_pools_the_true_length_survives_a_refusal():
    cluster, metrics = build_pools(Case(latency=FLAT, policies=bucket(10.0, 64.0)), bytes_per_token=1.0)
    Retries(cluster, Retry(attempts=1, jitter=0.0), np.random.default_rng(1))
    feed(cluster.env, cluster, [Arrival(request(i, 1.0, 64), 5) for i in range(6)])
    cluster.env.run()
    columns = metrics.columns()
    assert sorted(columns["status_code"].tolist()) == [COMPLETED] * 4 + [REJECTED] * 2
    assert set(columns["output_tokens"][columns["status_code"] == COMPLETED].tolist()) == {5}
    assert not cluster._output_tokens


def test_refusals_tell_when_to_come_back():
    queue = Case().scheduler()
    queue.now_s = 0.0
    limiter = load("admission", "token_bucket", {"tokens_per_s": 10.0, "burst_tokens": 100.0})
    assert limiter.admit(request(0, 0.0, 80), queue) is None
    assert limiter.admit(request(1, 0.0, 80), queue) == "token_bucket"
    assert limiter.retry_after_s(request(1, 0.0, 80), queue) == pytest.approx(6.0)
    assert limiter.retry_after_s(request(2, 0.0, 101), queue) is None
    breaker = load("admission", "burn_rate", {"least": 1, "open_s": 7.0})
    breaker.observe(Outcome("p1", 1, 0.0, 1.0, 9.0, 10.0, 10, 2, 0, "stop", 1.0))
    queue.now_s = 12.0
    assert breaker.admit(request(3, 12.0, priority=1), queue) == "burn_rate"
    assert breaker.retry_after_s(request(3, 12.0, priority=1), queue) == pytest.approx(5.0)


def test_the_burst_grows_while_objectives_hold_and_halves_with_one_that_does_not():
    limiter = load(
        "admission",
        "adaptive_burst",
        {"tokens_per_s": 10.0, "min_burst_tokens": 100.0, "max_burst_tokens": 400.0, "step_tokens": 150.0, "period": 2},
    )
    met, missed = (Outcome("p1", 1, 0.0, 0.0, first_s, 2.0, 10, 2, 0, "stop", 1.0) for first_s in (0.5, math.nan))
    sizes = []
    for outcome in (met, met, met, met, met, met, missed, missed, missed, met, met):
        limiter.observe(outcome)
        sizes.append(limiter.burst_tokens)
    assert sizes == [100, 250, 250, 400, 400, 400, 200, 100, 100, 100, 250]
    queue = Case().scheduler()
    queue.now_s = 0.0
    assert limiter.admit(request(0, 0.0, 100), queue) is None
    assert limiter.admit(request(1, 0.0, 100), queue) == "adaptive_burst"
    queue.now_s = 24.0
    assert limiter.admit(request(1, 0.0, 240), queue) is None, "the larger burst has filled"


def test_a_scenario_with_impatient_clients_reports_its_back_pressure():
    scenario = from_mapping(
        {
            "name": "s", "llm": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm"}, "max_model_len": 16384,
            "policy": {"admission": {"name": "token_bucket", "tokens_per_s": 800.0, "burst_tokens": 4000.0}},
            "workload": {
                "requests": 200, "arrivals": {"process": "poisson", "rate_rps": 8.0}, "prompt_tokens": 200, "output_tokens": 20,
                "retry": {"attempts": 2, "backoff_s": 0.5},
            },
        }
    )  # fmt: skip
    summary = simulate(scenario).summary
    pressure = summary["back_pressure"]
    assert pressure["retries"] > 10 and pressure["gave_up"] == summary["requests"]["rejected"] > 0
    assert summary["requests"]["arrived"] == 200 == summary["requests"]["completed"] + summary["requests"]["rejected"]
    assert pressure["refusals"] == pressure["retries"] + pressure["gave_up"]
    assert summary == simulate(scenario, stepwise=True).summary | {"events": summary["events"]}
