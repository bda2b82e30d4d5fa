"""Prefill and decode pools: conservation of requests, pages and bytes, back-pressure, and what the link adds."""

from __future__ import annotations

import pytest

from serving.clients import start_clients
from serving.errors import InputError
from serving.plan import StepShape
from serving.scenario import load
from sim.fleet import build_fleet, new_metrics, resolve_fleet
from sim.run import simulate

SMALL = ["workload.requests=300", "workload.arrivals.rate_rps=30"]


def fleet(*overrides: str):
    scenario = load("pd-8xh200", [*SMALL, *overrides])
    parts = resolve_fleet(scenario)
    metrics = new_metrics(scenario, keep_rows=True)
    cluster = build_fleet(scenario, parts, metrics)
    start_clients(
        cluster, scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=32768,
        prefix_caching=scenario.kv_cache.prefix_caching, saturation_rps=None, slo=scenario.slo, skipped={},
    )  # fmt: skip
    cluster.env.run()
    cluster.drain()
    return cluster, metrics, parts


def test_every_request_ends_once_and_nobody_holds_a_page_afterwards():
    cluster, metrics, _ = fleet()
    rows = metrics.columns()
    assert rows["request_id"].tolist() == list(range(300)) and not rows["status_code"].any()
    for replica in cluster.replicas:
        replica.scheduler.check()
        assert replica.scheduler.landing.parked == 0 and not replica.scheduler.live()
    assert cluster.in_flight == 0


def test_the_bytes_on_the_links_are_the_prompts_that_went_on():
    cluster, metrics, parts = fleet("kv_cache.prefix_caching=false")
    rows = metrics.columns()
    sent = int(rows["prompt_tokens"][rows["output_tokens"] > 1].sum())
    assert cluster.transfers == int((rows["output_tokens"] > 1).sum())
    assert cluster.transferred_bytes == pytest.approx(sent * parts["decode"].capacity.kv_bytes_per_token, rel=1e-12)
    cluster.network.check()


def test_first_tokens_come_from_the_prefill_pool_alone():
    cluster, metrics, _ = fleet()
    rows = metrics.columns()
    assert (rows["replica"][rows["output_tokens"] > 1] >= len(cluster.prefill.replicas)).all()
    assert (rows["arrival_s"] <= rows["scheduled_s"]).all() and (rows["scheduled_s"] < rows["first_token_s"]).all()
    assert (rows["first_token_s"] <= rows["finish_s"]).all()


def test_the_gap_before_the_second_token_holds_the_transfer():
    """One request alone: its second token comes a transfer and a decode step after its first."""
    scenario = load("pd-8xh200", ["workload.requests=1", "workload.prompt_tokens=4096", "workload.output_tokens=2"])
    parts = resolve_fleet(scenario)
    summary = simulate(scenario).summary
    from sim.network import Network
    from sim.topology import build

    network = Network(build("dgx-h200"))
    flow = network.start("gpu0", "gpu2", 4096 * parts["decode"].capacity.kv_bytes_per_token)
    while flow.state != "done":
        network.advance(network.next_completion_s())
    step_s = parts["decode"].latency.step_s(StepShape((), 1, 4097, 1))
    assert summary["itl_s"]["max"] == pytest.approx(flow.finish_s + step_s, rel=1e-9)


def test_where_the_decode_side_answers_the_first_token_waits_for_its_pages_and_nothing_else_changes():
    tight = ["kv_cache.blocks=700", "max_model_len=8192", "workload.prompt_tokens={dist: uniform, min: 500, max: 4000}"]
    cluster, metrics, _ = fleet(*tight)
    other, others, _ = fleet(*tight, "cluster.first_token=decode")
    early, late = metrics.columns(), others.columns()
    assert (early["finish_s"] == late["finish_s"]).all()
    delay_s = late["first_token_s"] - early["first_token_s"]
    assert (delay_s[early["output_tokens"] > 1] > 0).all() and not delay_s[early["output_tokens"] == 1].any()
    assert delay_s.sum() == pytest.approx(other.waited_s + other.transfer_s, rel=1e-9) and other.waited_s == cluster.waited_s > 0


def test_the_gap_after_a_first_token_from_the_decode_side_is_a_step():
    lone = ["workload.requests=1", "workload.prompt_tokens=4096", "workload.output_tokens=2", "cluster.first_token=decode"]
    scenario = load("pd-8xh200", lone)
    step_s = resolve_fleet(scenario)["decode"].latency.step_s(StepShape((), 1, 4097, 1))
    assert simulate(scenario).summary["itl_s"]["max"] == pytest.approx(step_s, rel=1e-9)


def test_a_decode_pool_without_pages_holds_prompts_back_and_loses_nothing():
    tight = ["kv_cache.blocks=700", "max_model_len=8192", "workload.prompt_tokens={dist: uniform, min: 500, max: 4000}"]
    cluster, metrics, _ = fleet(*tight)
    rows = metrics.columns()
    assert cluster.waited_s > 0, "somebody waited for pages on the decode side"
    assert len(rows["request_id"]) == 300 and not rows["status_code"].any()
    for replica in cluster.replicas:
        replica.scheduler.check()


def test_a_prefix_that_the_decode_replica_holds_is_not_sent_again():
    shared = "workload.prefix={groups: 1, tokens: 1024, share: 1.0}"
    lengths = "workload.prompt_tokens={dist: uniform, min: 1100, max: 1400}"
    with_cache, _, _ = fleet(shared, lengths)
    without, _, _ = fleet(shared, lengths, "kv_cache.prefix_caching=false")
    assert with_cache.transferred_bytes < 0.5 * without.transferred_bytes


def test_the_same_seed_gives_the_same_run():
    first, second = (simulate(load("pd-8xh200", SMALL)).summary for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("cluster.pools=[{role: prefill, replicas: 2}]", "one entry with role prefill and one with role decode"),
        ("cluster.pools=[{role: prefill, replicas: 2}, {role: decode, replicas: 9}]", "need 9 GPUs; the topology has 8"),
        ("cluster.topology=null", "topology"),
        ("cluster={gpu: h200-sxm, first_token: decode}", "first_token needs the key 'pools'"),
        ("policy.batching.max_in_flight=2", "max_in_flight"),
    ],
)
def test_pools_that_cannot_be_are_refused_with_the_reason(override, problem):
    with pytest.raises(InputError, match=problem):
        fleet(override)
