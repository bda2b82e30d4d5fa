"""Intervals cover, corrections agree with scipy, the gate needs effect and certainty, and closed forms meet simulated queues."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validate import queueing, stats

p_values = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def lindley_waits(arrival_gaps: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Waits of a first-come-first-served queue by Lindley's recursion, as a running maximum of partial sums."""
    steps = np.concatenate(([0.0], np.cumsum(services[:-1] - arrival_gaps[1:])))
    return steps - np.minimum.accumulate(steps)


class TestIntervals:
    @pytest.mark.parametrize("method", ["bca", "percentile"])
    def test_agrees_with_scipy(self, method):
        from scipy.stats import bootstrap

        values = rng(1).lognormal(0, 1, 60)
        ours = stats.bootstrap_interval(values, rng=rng(2), resamples=20_000, method=method)
        theirs = bootstrap((values,), np.mean, n_resamples=20_000, method=method, rng=rng(3)).confidence_interval
        assert ours.low == pytest.approx(theirs.low, rel=0.02)
        assert ours.high == pytest.approx(theirs.high, rel=0.02)

    def test_t_interval_is_scipys(self):
        from scipy.stats import ttest_1samp

        values = rng(4).normal(1, 2, 9)
        ours, theirs = stats.t_interval(values), ttest_1samp(values, 0).confidence_interval()
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))

    def test_coverage(self):
        """Of 400 samples of 40 skewed values, 95 % intervals of the mean cover about 95 %; BCa and t lose little to skew."""
        source = rng(5)
        covered = {"bca": 0, "percentile": 0, "t": 0}
        for _ in range(400):
            values = source.exponential(1.0, 40)
            for method in covered:
                if method == "t":
                    interval = stats.t_interval(values)
                else:
                    interval = stats.bootstrap_interval(values, rng=source, resamples=400, method=method)
                covered[method] += interval.holds(1.0)
        assert all(0.88 <= hits / 400 <= 0.98 for hits in covered.values()), covered

    @pytest.mark.parametrize(("quantile", "count"), [(0.5, 50), (0.9, 200), (0.99, 1000)])
    def test_quantile_interval_covers(self, quantile, count):
        source, truth = rng(6), -math.log1p(-quantile)
        hits = sum(stats.quantile_interval(source.exponential(1.0, count), quantile).holds(truth) for _ in range(600))
        assert hits / 600 >= 0.93  # conservative: at least 95 %, less three standard errors

    def test_quantile_interval_admits_what_it_cannot_bound(self):
        interval = stats.quantile_interval(np.arange(50.0), 0.99)
        assert interval.high == math.inf and interval.low <= 49

    def test_a_constant_has_no_width(self):
        assert stats.bootstrap_interval(np.full(8, 3.0), rng=rng()) == (3.0, 3.0, 3.0, 0.95)

    def test_series_interval_widens_with_memory(self):
        """Waits of a busy queue remember: the naive interval covers the true mean far too rarely, the block one mostly."""
        source, naive, blocked = rng(7), 0, 0
        truth = queueing.mm1(0.8, 1.0).wait_s
        for _ in range(60):
            waits = lindley_waits(source.exponential(1.25, 20_000), source.exponential(1.0, 20_000))
            naive += stats.t_interval(waits).holds(truth)
            blocked += stats.series_interval(waits, rng=source, block=1000, resamples=200).holds(truth)
        assert naive < 25 and blocked >= 48, (naive, blocked)

    def test_pairing_removes_what_both_share(self):
        noise = rng(8).lognormal(0, 0.5, 12)
        interval = stats.paired_interval(noise, noise * 1.02, rng=rng(9))
        assert interval.estimate == pytest.approx(0.02) and interval.half_width < 1e-9

    def test_mape(self):
        real = np.array([1.0, 2.0, 4.0, 8.0])
        interval = stats.mape_interval(real, real * [1.1, 0.9, 1.1, 0.9], rng=rng())
        assert interval.estimate == pytest.approx(0.1) and interval.half_width < 1e-12
        grouped = stats.mape_interval(np.ones(40), 1 + np.repeat([0.0, 0.2], 20), rng=rng(1), groups=np.repeat([0, 1], 20))
        alone = stats.mape_interval(np.ones(40), 1 + np.repeat([0.0, 0.2], 20), rng=rng(1))
        assert grouped.half_width > 2 * alone.half_width

    @pytest.mark.parametrize("values", [[], [1.0]])
    def test_too_little_is_refused(self, values):
        with pytest.raises(ValueError, match="at least two"):
            stats.bootstrap_interval(values, rng=rng())


class TestCorrections:
    @given(p_values)
    def test_benjamini_hochberg_is_scipys(self, p):
        from scipy.stats import false_discovery_control

        np.testing.assert_allclose(stats.benjamini_hochberg(p), false_discovery_control(p), atol=1e-12)

    @given(p_values)
    def test_holm_is_between_none_and_bonferroni_and_keeps_order(self, p):
        adjusted, raw = stats.holm(p), np.asarray(p)
        assert (adjusted >= raw).all() and (adjusted <= np.minimum(raw * len(p), 1) + 1e-15).all()
        assert (adjusted >= stats.benjamini_hochberg(p) - 1e-15).all()
        order = np.argsort(raw, kind="stable")
        assert (np.diff(adjusted[order]) >= 0).all()

    def test_sign_flips_are_scipys(self):
        from scipy.stats import permutation_test

        values = rng(3).normal(0.3, 1, 9)
        theirs = permutation_test((values, np.zeros(9)), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", alternative="greater")
        assert stats.sign_flip_p(values, rng=rng()) == pytest.approx(theirs.pvalue)
        assert stats.sign_flip_p(np.tile(values, 2), rng=rng()) == pytest.approx(stats.t_p(np.tile(values, 2)), abs=0.02)

    @settings(max_examples=30)
    @given(st.lists(st.floats(-5, 5), min_size=3, max_size=20))
    def test_t_p_is_scipys(self, values):
        from scipy.stats import ttest_1samp

        if np.std(values) > 1e-6:
            assert stats.t_p(values) == pytest.approx(ttest_1samp(values, 0, alternative="greater").pvalue, abs=1e-9)


class TestGate:
    def test_needs_effect_and_certainty(self):
        source = rng(1)
        verdicts = {
            decision.metric: decision.verdict
            for decision in stats.gate(
                {
                    "clear": 0.05 + source.normal(0, 0.005, 10),
                    "tiny": 0.001 + source.normal(0, 0.00005, 10),
                    "noisy": 0.05 + source.normal(0, 0.2, 10),
                    "better": -0.05 + source.normal(0, 0.005, 10),
                    "same": np.zeros(10),
                }
            )
        }
        assert verdicts == {"clear": "regressed", "tiny": "unchanged", "noisy": "undecided", "better": "improved", "same": "unchanged"}

    def test_false_alarms_stay_rare(self):
        """No change, eight correlated metrics, ten pairs: at most 1 % of suites raise an alarm (plus three standard errors)."""
        source, alarms, suites = rng(2), 0, 500
        for _ in range(suites):
            shared = source.normal(0, 0.02, 10)
            suite = {f"m{i}": shared * 0.5 + source.normal(0, 0.02, 10) for i in range(8)}
            alarms += any(decision.verdict == "regressed" for decision in stats.gate(suite, effect=0.0))
        assert alarms / suites <= 0.01 + 3 * math.sqrt(0.01 / suites)

    def test_required_replications_give_the_power_asked_for(self):
        source = rng(3)
        pairs = stats.required_replications(source.normal(0, 0.02, 200), 0.02, alpha=0.01, power=0.95)
        found = sum(stats.t_p(source.normal(0.02, 0.02, pairs)) < 0.01 for _ in range(500))
        assert 0.90 <= found / 500 <= 0.995 and 15 <= pairs <= 25

    def test_no_spread_needs_the_minimum(self):
        assert stats.required_replications([0.1, 0.1, 0.1], 0.01) == 2


class TestQueueing:
    @pytest.mark.parametrize(("rho", "exponential"), [(0.5, True), (0.5, False), (0.8, True), (0.8, False)])
    def test_closed_forms_meet_a_simulated_queue(self, rho, exponential):
        source, count = rng(4), 200_000
        services = source.exponential(1.0, count) if exponential else np.ones(count)
        waits = lindley_waits(source.exponential(1 / rho, count), services)
        station = (queueing.mm1 if exponential else queueing.md1)(rho, 1.0)
        assert stats.series_interval(waits, rng=source, block=5000, level=0.999, resamples=200).holds(station.wait_s)
        assert station.present == pytest.approx(queueing.littles_law_present(rho, station.sojourn_s))

    @given(st.floats(0.01, 0.95))
    def test_forms_agree_where_they_meet(self, rho):
        assert queueing.mmc(rho, 1.0, 1) == pytest.approx(queueing.mm1(rho, 1.0))
        assert queueing.md1(rho, 1.0).wait_s == pytest.approx(queueing.mm1(rho, 1.0).wait_s / 2)
        assert queueing.mmc(rho * 4, 1.0, 4).wait_s <= queueing.mm1(rho, 1.0).wait_s

    def test_quantile_of_the_sojourn(self):
        assert queueing.mm1_sojourn_quantile(0.5, 1.0, 1 - math.exp(-1)) == pytest.approx(2.0)

    def test_overload_is_the_field_case(self):
        """1,000 requests offered at 32 rps to a system that serves 1.10 rps wait 438.9 s on average."""
        assert queueing.overload_mean_wait_s(1000, 32, 1.10) == pytest.approx(438.9, abs=0.1)
        assert queueing.overload_mean_wait_s(1000, 1, 2) == 0

    def test_saturated_queue_has_no_steady_state(self):
        with pytest.raises(ValueError, match="steady state"):
            queueing.mm1(1.0, 1.0)
