"""The gate: what it stops, what it lets through, and the figures it judges by."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving.rng import stream
from validate.regress import gate
from validate.regress.measure import METRICS, ClassShare, Metric, Sample, _worst_burn, as_change, smooth_quantile, worse


def samples(count: int, seed: int, *, scale: dict[str, float] | None = None, noise: float = 0.0, attained: float = 0.99) -> list[Sample]:
    """Replications whose metrics are those of the pair's seed times ``scale``, and noise of their own."""
    common, own = stream(7, "pairs"), stream(seed, "own")
    rows = []
    for _ in range(count):
        values = {}
        for name in METRICS:
            value = float(np.exp(common.normal(0, 0.3)))
            values[name] = value * (scale or {}).get(name, 1.0) * (1 + noise * float(own.normal()))
        values["slo_attainment"], values["preemptions_per_request"] = attained, 0.0
        rows.append(Sample(values, {"default": ClassShare(1000, round(1000 * attained), (1.0, 2.0))}))
    return rows


def test_the_same_policy_passes_whatever_the_noise_of_the_workload():
    verdicts = gate.decide({"chat": (samples(24, 1), samples(24, 2))})
    assert [verdict.verdict for verdict in verdicts] == ["unchanged"] * len(METRICS)
    assert all(verdict.change == (0, 0, 0, 0.98) and verdict.p == 1 for verdict in verdicts)


def test_a_change_for_the_worse_is_stopped_and_only_that():
    new = samples(24, 2, scale={"ttft_p99_s": 1.02, "goodput_rps": 0.97, "e2e_mean_s": 0.9}, noise=0.005)
    verdicts = {verdict.metric: verdict.verdict for verdict in gate.decide({"chat": (samples(24, 1), new)})}
    assert {name for name, verdict in verdicts.items() if verdict == "regressed"} == {"ttft_p99_s", "goodput_rps"}
    assert verdicts["e2e_mean_s"] == "improved"


def test_a_certain_trifle_and_a_large_chance_are_let_through():
    trifle = gate.decide({"chat": (samples(24, 1), samples(24, 2, scale={"ttft_p99_s": 1.005}, noise=0.0005))})
    assert {verdict.verdict for verdict in trifle} == {"unchanged"}
    chance = gate.decide({"chat": (samples(6, 1), samples(6, 2, scale={"ttft_p99_s": 1.03}, noise=0.08))})
    found = next(verdict for verdict in chance if verdict.metric == "ttft_p99_s")
    assert found.verdict == "undecided" and found.required > 6


def test_more_metrics_ask_for_more_certainty():
    old, new = samples(8, 1), samples(8, 2, scale={"ttft_p99_s": 1.02}, noise=0.009)
    changes = gate.changes_of({"chat": (old, new)})
    alone = gate.stats.gate({"x": changes["chat", "ttft_p99_s"]}, effect=0.01, alpha=0.01)[0].p
    among = next(verdict.p for verdict in gate.decide({"chat": (old, new)}) if verdict.metric == "ttft_p99_s")
    assert among == pytest.approx(min(1.0, alone * len(METRICS)))


def test_regressed_agrees_with_decide():
    pairs = {"chat": (samples(24, 1), samples(24, 2, scale={"ttft_p99_s": 1.03, "tpot_mean_s": 1.1}, noise=0.01))}
    stopped = gate.regressed(gate.changes_of(pairs))
    assert stopped == [(verdict.scenario, verdict.metric) for verdict in gate.decide(pairs) if verdict.regressed]


def test_a_change_is_as_far_up_as_down_when_sides_are_exchanged():
    old, new = np.exp(stream(1, "a").normal(0, 1, 50)), np.exp(stream(1, "b").normal(0, 1, 50))
    for compared in (Metric("x", +1), Metric("x", -1), Metric("x", +1, relative=False)):
        assert np.allclose(worse(compared, old, new), -worse(compared, new, old))
    assert as_change(Metric("x", -1), float(worse(Metric("x", -1), [2.0], [1.0])[0])) == pytest.approx(-0.5)


def test_nothing_left_is_the_worst_of_all_and_nothing_twice_is_no_change():
    goodput = METRICS["goodput_rps"]
    assert worse(goodput, [5.0, 5.0], [0.0, 0.0]).min() > 1
    assert not worse(goodput, [0.0, 0.0], [0.0, 0.0]).any()


def test_a_metric_without_a_value_somewhere_is_left_out():
    old, new = samples(5, 1), samples(5, 2)
    new[3].values["tpot_p99_s"] = math.nan
    assert {verdict.metric for verdict in gate.decide({"chat": (old, new)})} == set(METRICS) - {"tpot_p99_s"}


@pytest.mark.parametrize("quantile", [0.5, 0.99])
def test_the_smooth_quantile_is_one_and_less_noisy_in_pairs(quantile):
    rng = stream(3, "quantile")
    smooth, plain = [], []
    for _ in range(60):
        values = rng.lognormal(0, 0.7, 1500)
        moved = values * rng.normal(1, 0.05, 1500)
        smooth.append(math.log(smooth_quantile(moved, quantile) / smooth_quantile(values, quantile)))
        plain.append(math.log(np.quantile(moved, quantile) / np.quantile(values, quantile)))
        assert smooth_quantile(values, quantile) == pytest.approx(np.quantile(values, quantile), rel=0.15)
    assert np.std(smooth) < np.std(plain)
    assert math.isnan(smooth_quantile(np.array([]), quantile))


def test_burn_rates_by_window():
    arrival_s, failed = np.arange(100.0), np.zeros(100, bool)
    failed[40:45] = True
    assert _worst_burn(arrival_s, failed, 100.0, 0.99) == pytest.approx(5.0)
    assert _worst_burn(arrival_s, failed, 10.0, 0.99) == pytest.approx(50.0)
    assert _worst_burn(arrival_s[:0], failed[:0], 10.0, 0.99) == 0


@pytest.mark.parametrize(("before", "after", "verdict"), [(0.99, 0.97, "broken"), (0.97, 0.99, "mended"), (0.9, 0.9, "missed"), (1.0, 1.0, "met")])
def test_the_slo_table(before, after, verdict):
    table = gate.objectives({"chat": (samples(3, 1, attained=before), samples(3, 2, attained=after))}, {"chat": 0.98})
    assert [(row.class_name, row.verdict) for row in table] == [("default", verdict)]
    assert table[0].burn_baseline == pytest.approx(((1 - before) / 0.02, 1.0, 2.0))
