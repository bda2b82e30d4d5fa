"""Speculative decoding: exact where nothing is drafted, the closed form of acceptance, pages returned, when it pays."""

from __future__ import annotations

import pytest

from hwmodels.drafting import Drafting
from serving.errors import InputError
from serving.plan import StepShape
from serving.scenario import load
from serving.scheduler import Scheduler
from sim.run import simulate


def run(*overrides: str) -> dict:
    return simulate(load("speculative", ["workload.requests=120", *overrides])).summary


def test_speculating_without_drafts_is_plain_decoding_bit_for_bit():
    plain = run("speculation=null", "kv_cache.blocks=1200", "workload.arrivals.rate_rps=4")
    walked = run("speculation.policy=none", "kv_cache.blocks=1200", "workload.arrivals.rate_rps=4")
    for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "steps", "preemptions", "duration_s", "kv_utilisation"):
        assert walked[key] == plain[key], key


@pytest.mark.parametrize(("drafts", "acceptance"), [(1, 0.5), (4, 0.7), (7, 0.9)])
def test_the_acceptance_length_is_that_of_a_cut_geometric_distribution(drafts, acceptance):
    summary = run(f"speculation.policy={{name: fixed, tokens: {drafts}}}", f"speculation.acceptance={acceptance}")
    expected = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
    # The last step of an answer is cut short by its end, so the mean lies a little below.
    assert expected * 0.93 < summary["speculation"]["acceptance_length"] < expected * 1.02


def test_certain_drafts_all_count_and_hopeless_ones_never():
    sure = run("speculation.acceptance=1.0")["speculation"]
    assert sure["acceptance_length"] > 4.8
    assert run("speculation.acceptance=0.0")["speculation"]["acceptance_length"] == 1.0


def test_pages_of_rejected_tokens_are_returned_and_every_answer_has_its_length(monkeypatch):
    commit = Scheduler.commit

    def checked(self, plan, result):
        commit(self, plan, result)
        self.check()

    monkeypatch.setattr(Scheduler, "commit", checked)
    tight = ("kv_cache.blocks=1100", "workload.arrivals.rate_rps=6", "workload.requests=60")
    summary = run(*tight)
    assert summary["preemptions"] > 0 and summary["requests"]["completed"] == 60
    tokens = summary["output_tokens_per_s"] * summary["duration_s"]
    plain = run(*tight, "speculation=null")
    assert tokens == pytest.approx(plain["output_tokens_per_s"] * plain["duration_s"], rel=1e-12)


def test_a_dear_draft_with_little_acceptance_is_slower_and_the_break_even_says_from_where():
    """Case T4: a step of 2.4 to 2.6 times a plain one at an acceptance length of 1.86."""
    summary = run("speculation.draft_llm=null", "speculation.draft_step_fraction=0.36", "speculation.acceptance=0.4623")
    figures = summary["speculation"]
    assert 1.7 < figures["acceptance_length"] < 1.9
    assert 2.3 < figures["step_cost_ratio"] < 2.7
    assert figures["speedup"] < 1 and figures["break_even_acceptance_length"] > figures["acceptance_length"]
    assert summary["tpot_s"]["mean"] > run("speculation=null")["tpot_s"]["mean"]


def test_a_budget_stops_drafting_in_large_batches():
    busy = ("workload.arrivals.rate_rps=30", "workload.requests=300")
    fixed = run(*busy)
    small = run(*busy, "speculation.policy={name: small_batch, tokens: 4, budget_tokens: 16}")
    assert small["speculation"]["draft_tokens"] < 3 < fixed["speculation"]["draft_tokens"]
    assert small["duration_s"] <= fixed["duration_s"]


def test_the_price_of_drafts_is_added_once_for_each():
    class Flat:
        def step_s(self, shape):
            return 1.0 + 0.1 * shape.decodes

        def run_s(self, shape, steps):
            return [self.step_s(shape)] * steps

    model = Drafting(Flat(), fraction=0.2)
    assert model.step_s(StepShape((), 5, 500, 5)) == pytest.approx(1.5)
    assert model.step_s(StepShape((), 5, 500, 20, query_tokens_per_decode=4)) == pytest.approx(1.5 + 3 * 0.2 * 1.5)


def test_two_plans_in_flight_cannot_speculate():
    with pytest.raises(InputError, match="max_in_flight"):
        run("policy.batching.max_in_flight=2")
