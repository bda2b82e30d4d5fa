"""Parts add up to the whole, and a planted cause comes out on top."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from serving.errors import InputError
from validate.explain import CAUSES, METRICS, attribute, explain, explain_all, preempted_seconds, rank
from validate.run_data import read_run
from validate.step_parts import CLOCK, PREFILL, eager_steps, fit_step_parts

SPIKES = ("host_stall", "clock", "graph_miss", "prefill_interference", "cold_start")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("spike", [None, *SPIKES])
def test_parts_add_up_and_none_is_negative(make_run, spike, metric):
    attribution = attribute(read_run(make_run(spike=spike)), metric)
    np.testing.assert_allclose(attribution.parts_s.sum(axis=1), attribution.whole_s, rtol=1e-9, atol=1e-9)
    assert (attribution.parts_s >= -1e-9).all()


@pytest.mark.parametrize("spike", SPIKES)
def test_a_planted_cause_is_found(make_run, spike):
    causes = explain(read_run(make_run(spike=spike)), "ttft_s" if spike == "cold_start" else "tpot_s", 0.97)
    assert causes[0].cause == spike and causes[0].requests > 0 and causes[0].worst_request >= 0, causes[:3]


def test_an_undisturbed_run_blames_nothing_foreign(make_run):
    causes = explain(read_run(make_run()))
    foreign = sum(row.excess_s for row in causes if row.cause in ("clock", "graph_miss", "host_stall", "cold_start", "transfer", "preemption"))
    assert foreign <= 0.01 * sum(row.excess_s for row in causes)


def test_excess_adds_up_to_the_difference_of_means(make_run):
    attribution = attribute(read_run(make_run()))
    causes, whole = rank(attribution), attribution.whole_s
    low, high, edge = np.quantile(whole, (0.4, 0.6, 0.99))
    assert sum(row.excess_s for row in causes) == pytest.approx(
        whole[whole >= edge].mean() - whole[(whole >= low) & (whole <= high)].mean()
    )
    assert sum(row.share for row in causes) == pytest.approx(1.0)
    assert sum(row.requests for row in causes) == (whole >= edge).sum()
    assert [row.excess_s for row in causes] == sorted((row.excess_s for row in causes), reverse=True)


def test_step_parts_add_up_to_durations(make_run):
    steps = read_run(make_run(spike="clock")).steps
    parts = fit_step_parts(steps)
    np.testing.assert_allclose(parts.sum(axis=1), steps["duration_s"], rtol=1e-9)
    assert (parts >= 0).all()
    slow, alone = (steps["step"] >= 300) & (steps["step"] < 420), steps["prefill_tokens"] == 0
    assert (parts[slow & alone, CLOCK] > 0).all() and not (parts[~slow, CLOCK] > 0).any()
    assert np.mean(parts[slow & ~alone, CLOCK] > 0) > 0.9  # those between slow decode steps
    np.testing.assert_allclose(parts[slow & alone, CLOCK], steps["duration_s"][slow & alone] * 2 / 3, rtol=0.02)  # three times too long


@pytest.mark.parametrize(("scenario", "overrides"), [("agent-sessions", []), ("pd-8xh200", ["workload.requests=400"])])
def test_long_prompts_are_not_blamed_on_the_clock(tmp_path, scenario, overrides):
    """Attention over a long context makes chunks dearer than their tokens tell; the simulated GPU's clock is steady all the same."""
    from serving.scenario import load
    from sim.run import simulate

    simulate(load(scenario, overrides), out=tmp_path / "run")
    for metric, causes in explain_all(read_run(tmp_path / "run")).items():
        assert all(row.share < 0.01 for row in causes if row.cause == "clock"), (metric, causes)


def test_a_run_without_decode_steps_is_all_prefill(make_run):
    steps = read_run(make_run()).steps
    mixed = {name: column[steps["prefill_tokens"] > 0] for name, column in steps.items()}
    np.testing.assert_allclose(fit_step_parts(mixed)[:, PREFILL], mixed["duration_s"])


def test_runs_of_steps_in_one_row_explain_alike(make_run):
    """A row of k steps is split like k rows: merge pairs of undisturbed decode-only steps and compare."""
    run = read_run(make_run())
    steps = run.steps
    plain = (steps["prefill_tokens"] == 0) & (steps["decode_seqs"] > 0)
    merged = {name: [] for name in steps}
    row = 0
    while row < len(steps["step"]):
        pair = row + 1 < len(steps["step"]) and plain[row] and plain[row + 1] and steps["replica"][row] == steps["replica"][row + 1]
        pair = pair and steps["decode_seqs"][row] == steps["decode_seqs"][row + 1]
        pair = pair and steps["start_s"][row + 1] - steps["start_s"][row] - steps["duration_s"][row] < 1e-9
        for name in steps:
            merged[name].append(steps[name][row : row + 2].sum() if pair and name in ("duration_s", "steps") else steps[name][row])
        row += 2 if pair else 1
    assert len(merged["step"]) < len(steps["step"])
    other = replace(run, steps={name: np.array(values) for name, values in merged.items()})
    np.testing.assert_allclose(attribute(other).parts_s, attribute(run).parts_s, atol=2e-3)


def test_preemption_is_estimated_from_missing_tokens_and_exact_from_plans(make_run):
    run = read_run(make_run())
    requests = dict(run.requests)
    victim = int(np.argmax(requests["output_tokens"]))
    requests["preemptions"] = requests["preemptions"].copy()
    requests["preemptions"][victim] = 1
    requests["output_tokens"] = requests["output_tokens"].copy()
    requests["output_tokens"][victim] //= 2  # half of the steps of its decode phase gave it nothing
    changed = replace(run, requests=requests)
    index = CAUSES.index("preemption")
    decode_s = requests["finish_s"][victim] - requests["first_token_s"][victim]
    assert attribute(changed).parts_s[victim, index] == pytest.approx(decode_s / 2, rel=0.05)
    exact = attribute(changed, preempted_s={victim: 0.25})
    assert exact.parts_s[victim, index] == pytest.approx(0.25)
    np.testing.assert_allclose(exact.parts_s.sum(axis=1), exact.whole_s)


def test_preempted_seconds_run_until_recomputation_ends():
    own = [
        {"schedule_s": 0.0, "commit_s": 1.0, "chunks": [(1, 16)], "preempted": []},
        {"schedule_s": 1.0, "commit_s": 2.0, "chunks": [], "preempted": [1]},
        {"schedule_s": 2.0, "commit_s": 3.0, "chunks": [(1, 8)], "preempted": []},
        {"schedule_s": 3.0, "commit_s": 4.0, "chunks": [(1, 8)], "preempted": []},
        {"schedule_s": 4.0, "commit_s": 5.0, "chunks": [], "preempted": [1]},
        {"schedule_s": 5.0, "commit_s": 6.5, "chunks": [(1, 40)], "preempted": []},
    ]
    other = {"replica": 1, "schedule_s": 2.5, "commit_s": 3.5, "chunks": [], "preempted": []}  # its plans say nothing about request 1
    plans = []
    for plan in own:
        chunks = [{"request_id": request, "new_tokens": tokens} for request, tokens in plan["chunks"]]
        plans += [{**plan, "replica": 0, "chunks": chunks}, other]
    assert preempted_seconds(plans) == {1: pytest.approx(3.0 + 2.5)}


def test_the_estimate_of_preemption_meets_the_plans(tmp_path):
    """A real simulated run under block shortage: time out by counting tokens against time out by the plans themselves."""
    import pyarrow.parquet as pq

    from serving.scenario import load
    from sim.run import simulate

    overrides = ["workload.requests=300", "kv_cache.blocks=1200", "workload.arrivals.rate_rps=40"]
    simulate(load("chat-8b", overrides), out=tmp_path / "run", plans=True)
    run = read_run(tmp_path / "run")
    assert run.summary["preemptions"] > 20
    exact = preempted_seconds(pq.read_table(tmp_path / "run" / "plans.parquet").to_pylist())
    index = CAUSES.index("preemption")
    truth, guess = attribute(run, preempted_s=exact).parts_s, attribute(run).parts_s
    assert guess[:, index].sum() == pytest.approx(truth[:, index].sum(), rel=0.25)
    assert set(exact) == set(run.requests["request_id"][run.requests["preemptions"] > 0])


def test_pools_are_told_apart(tmp_path):
    """A real disaggregated run: prompts are split on the replica that computed them, and what lies before the first decode step is hand-over."""
    from serving.scenario import load
    from sim.run import simulate

    simulate(load("pd-8xh200", ["workload.requests=200"]), out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    attribution = attribute(run)
    np.testing.assert_allclose(attribution.parts_s.sum(axis=1), attribution.whole_s)
    assert (attribution.parts_s >= -1e-9).all()
    seconds = {cause: attribution.parts_s[:, index] for index, cause in enumerate(CAUSES)}
    several = run.requests["output_tokens"] > 1
    assert (seconds["transfer"][several] > 0).all() and np.median(seconds["transfer"]) < 0.05 * np.median(seconds["decode"])
    steps, decode = run.steps, np.isin(run.steps["replica"], run.pools["decode"])
    first = int(np.flatnonzero(several)[0])  # its first decode step, found by counting back from its finish
    mine = decode & (steps["replica"] == run.requests["replica"][first]) & (steps["start_s"] + steps["duration_s"] <= run.requests["finish_s"][first] + 1e-9)
    starts = np.repeat(steps["start_s"][mine], steps["steps"][mine])
    if (steps["steps"][mine] == 1).all():
        landed = starts[-(int(run.requests["output_tokens"][first]) - 1)]
        assert seconds["transfer"][first] == pytest.approx(landed - run.requests["first_token_s"][first], abs=1e-6)
    assert seconds["prefill_interference"].sum() < seconds["prefill"].sum() + seconds["queue"].sum()


def test_without_graphs_no_step_missed_one():
    idle = {"graph": np.array([0, 0]), "prefill_tokens": np.zeros(2)}
    assert eager_steps(idle).tolist() == [False, False]
    assert eager_steps({**idle, "graph": np.array([8, 0])}).tolist() == [False, True]


def test_no_records_is_the_users_mistake(make_run):
    run = read_run(make_run())
    with pytest.raises(InputError, match="no records"):
        explain(replace(run, requests={}, steps={}))
    with pytest.raises(InputError, match="e2e_s"):
        explain(run, "e2e")
