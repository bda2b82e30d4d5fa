"""Metrics against their definitions, written the slow and obvious way."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from serving import metrics as m
from serving.metrics import FleetTotals, Metrics, Row

NAN = math.nan


def no_targets(_: str) -> tuple[float, float, float]:
    return (math.inf, math.inf, math.inf)


TOTALS = FleetTotals(
    duration_s=100.0, replicas=2, gpus=4, gpu_usd_per_h=3.6, busy_s=50.0, steps=7, events=9, kv_blocks=1000, kv_block_seconds=25_000.0,
    kv_max_fraction=0.5, preemptions=3, prompt_tokens=200, cached_tokens=50,
)  # fmt: skip


def row(request_id=0, *, group=0, arrival=0.0, prompt=10, output=5, scheduled=None, first=None, finish=None, preemptions=0, status=m.COMPLETED):
    scheduled = arrival + 0.1 if scheduled is None else scheduled
    first = scheduled + 0.2 if first is None else first
    finish = first + 0.05 * (output - 1) if finish is None else finish
    return (request_id, group, arrival, prompt, 0, output, scheduled, first, finish, preemptions, 0, status)


def collected(rows, *, classes=("a", "b"), targets=no_targets, **options) -> Metrics:
    metrics = Metrics(classes, targets, **options)
    for item in rows:
        metrics.finish(item)
        metrics.flush_if_full()
    return metrics


def summary(metrics: Metrics, totals: FleetTotals = TOTALS) -> dict:
    return metrics.summary(scenario="s", seed=1, totals=totals)


def random_rows(count: int, seed: int = 0) -> list[tuple]:
    rng = np.random.default_rng(seed)
    waits, times = rng.exponential(0.3, (count, 2)), np.sort(rng.uniform(0, 90, count))
    return [
        row(i, group=int(rng.integers(2)), arrival=float(times[i]), output=int(rng.integers(1, 40)), scheduled=float(times[i] + waits[i, 0]),
            first=float(times[i] + waits[i].sum()), preemptions=int(rng.integers(0, 2)))
        for i in range(count)
    ]  # fmt: skip


def test_the_keys_are_the_contract():
    result = summary(collected([row()]))
    assert list(result) == [
        "schema_version", "scenario", "seed", "requests", "duration_s", "ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s",
        "prompt_tokens_per_s", "output_tokens_per_s", "requests_per_s", "goodput_rps", "slo_attainment", "preemptions",
        "prefix_cache_hit_rate", "kv_utilisation", "gpu_busy_fraction", "load_factor", "steps", "events", "cost_usd",
        "usd_per_million_output_tokens",
    ]  # fmt: skip
    assert list(result["requests"]) == ["arrived", "completed", "rejected", "failed", "preempted"]
    assert list(result["ttft_s"]) == ["mean", "p50", "p90", "p95", "p99", "max"]
    json.dumps(result, allow_nan=False)


def test_latencies_by_their_definitions():
    rows = random_rows(3000)
    result = summary(collected(rows))
    columns = np.array(rows)
    arrival, output, scheduled, first, finish = columns[:, [2, 5, 6, 7, 8]].T
    several = output > 1
    expected = {
        "ttft_s": first - arrival,
        "e2e_s": finish - arrival,
        "queue_s": scheduled - arrival,
        "tpot_s": ((finish - first)[several] / (output[several] - 1)),
    }
    for name, values in expected.items():
        assert result[name]["max"] == values.max()
        assert result[name]["mean"] == pytest.approx(values.mean(), rel=1e-6)
        for percent in (50, 90, 95, 99):
            assert result[name][f"p{percent}"] == pytest.approx(np.percentile(values, percent), rel=1e-3, abs=1e-12)
    assert result["output_tokens_per_s"] == output.sum() / 100.0
    assert result["requests"]["preempted"] == columns[:, 9].sum()


def test_order_of_finishing_does_not_change_a_bit():
    targets = {"a": (0.4, 0.05, 2.0), "b": (0.9, math.inf, math.inf)}.get
    rows = random_rows(20_000)
    shuffled = [rows[i] for i in np.random.default_rng(5).permutation(len(rows))]
    for options in ({}, {"warmup_s": 20.0, "cooldown_s": 15.0}):
        assert summary(collected(rows, targets=targets, **options)) == summary(collected(shuffled, targets=targets, **options))


def test_slo_by_class_counts_refused_and_failed_requests_against_it():
    rows = [
        row(0, group=0, first=0.3),  # met
        row(1, group=0, first=0.9, finish=1.0),  # TTFT missed
        row(2, group=1, first=0.9, finish=1.0),  # met: this class allows a second
        row(3, group=1, first=0.3, finish=0.3 + 4 * 0.2),  # TPOT missed
        row(4, group=1, output=1, first=0.3, finish=0.3),  # met: one token has no TPOT
        row(5, group=1, scheduled=NAN, first=NAN, finish=0.0, output=0, status=m.REJECTED),
        row(6, group=1, first=NAN, finish=2.0, output=0, status=m.ABORTED),
    ]
    result = summary(collected(rows, targets={"a": (0.5, 0.1, math.inf), "b": (1.0, 0.1, math.inf)}.get))
    assert result["slo_attainment"] == {"overall": 3 / 7, "by_class": {"a": 1 / 2, "b": 2 / 5}}
    assert result["goodput_rps"] == 3 / 100 and result["requests_per_s"] == 5 / 100
    assert result["requests"] == {"arrived": 7, "completed": 5, "rejected": 1, "failed": 1, "preempted": 0}


def test_the_end_to_end_objective():
    rows = [row(0, finish=1.0), row(1, finish=3.0)]
    assert summary(collected(rows, targets=lambda _: (math.inf, math.inf, 2.0)))["slo_attainment"]["overall"] == 0.5


def test_a_class_may_turn_up_later():
    metrics = Metrics((), {"fast": (0.5, 1.0, 99.0), "slow": (9.0, 1.0, 99.0)}.get)
    for name, first in (("slow", 0.9), ("fast", 0.9), ("slow", 0.3)):
        metrics.finish(row(group=metrics.class_index(name), first=first, finish=2.0))
    assert metrics.class_names == ("slow", "fast")
    assert summary(metrics)["slo_attainment"]["by_class"] == {"slow": 1.0, "fast": 0.0}


def test_the_measured_window_is_by_arrival():
    rows = [row(i, arrival=float(i), prompt=1) for i in range(100)]
    result = summary(collected(rows, warmup_s=10, cooldown_s=20))
    assert result["requests"]["completed"] == 100  # counts are the whole run's
    assert result["requests_per_s"] == 71 / 70  # 10 to 80, both ends in
    assert result["prompt_tokens_per_s"] == 71 / 70
    nothing = summary(collected(rows, warmup_s=90, cooldown_s=20))
    assert nothing["ttft_s"]["mean"] is None and nothing["requests_per_s"] is None


def test_gaps_are_weighted_and_keep_to_the_window():
    metrics = collected([row()])
    metrics.itl([0.010, 0.030], [3, 1])
    metrics.itl(np.array([0.010]), np.array([6]))
    result = summary(metrics)
    assert result["itl_s"]["mean"] == pytest.approx(0.012)
    assert result["itl_s"]["max"] == 0.030

    windowed = Metrics(("default",), no_targets, warmup_s=10, cooldown_s=20)
    windowed.itl([0.1, 0.2, 0.3], [1, 1, 1], [5.0, 50.0, 90.0])
    windowed.itl(np.array([0.4]), np.array([1]), np.array([80.0]))
    result = summary(windowed)
    assert result["itl_s"]["max"] == 0.4 and result["itl_s"]["mean"] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="ended"):
        windowed.itl([0.1], [1])


@pytest.mark.parametrize("batch", [1, 7, 100_000])
def test_how_gaps_are_batched_does_not_matter(batch):
    rng = np.random.default_rng(1)
    gaps, weights = rng.uniform(0.005, 0.05, 150_000), rng.integers(1, 200, 150_000)
    ends = np.cumsum(gaps)
    whole = Metrics(("default",), no_targets, warmup_s=10, cooldown_s=30)
    whole.itl(gaps, weights, ends)
    parts = Metrics(("default",), no_targets, warmup_s=10, cooldown_s=30)
    limit = 3000 if batch < 100 else len(gaps)
    for start in range(0, limit, batch):
        cut = slice(start, min(start + batch, limit))
        parts.itl(gaps[cut].tolist(), weights[cut].tolist(), ends[cut].tolist())
    parts.itl(gaps[limit:], weights[limit:], ends[limit:])
    assert summary(whole)["itl_s"] == summary(parts)["itl_s"]


def test_fleet_figures():
    result = summary(collected([row(output=500, finish=30.0)]))
    assert result["gpu_busy_fraction"] == 0.25
    assert result["kv_utilisation"] == {"mean": 0.25, "max": 0.5}
    assert result["prefix_cache_hit_rate"] == 0.25
    assert result["cost_usd"] == pytest.approx(0.4)
    assert result["usd_per_million_output_tokens"] == pytest.approx(800.0)


def test_rows_are_kept_in_order_of_id_only_when_wanted():
    rows = random_rows(9000)
    columns = collected(reversed(rows), keep_rows=True).columns()
    assert list(columns) == list(Row._fields)
    assert columns["request_id"].tolist() == list(range(9000))
    assert columns["first_token_s"].tolist() == [r[7] for r in rows]
    assert columns["output_tokens"].dtype == np.int64
    with pytest.raises(ValueError, match="not kept"):
        Metrics(("default",), no_targets).columns()


def test_memory_does_not_grow_with_requests():
    metrics = collected(random_rows(20_000))
    assert len(metrics._rows) < m.FLUSH_ROWS and metrics._kept is None and len(metrics._held_rows) == 0
