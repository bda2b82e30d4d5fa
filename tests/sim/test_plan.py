"""Plans: the answer of brute force, whatever pruned it; what is refused and why; figures that equal those of a run."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import PLAN, SMALL, Terminal, planned

import twinserve
from serving.errors import InputError
from serving.scenario import from_mapping, load
from serving.scenario.planning import Select
from sim.run import simulate
from sim.study.candidates import enumerate_candidates, with_replicas
from sim.study.evaluate import _fewest, confirm, headroom, replica_rate
from sim.study.executors import open_pool
from sim.study.load import measure, scaled
from sim.study.operating import operating_points
from sim.study.pareto import front, select
from sim.study.plan import make_plan
from sim.study.points import Points
from sim.study.tables import print_plan
from sim.study.verdict import attainment, decide, refuted, wilson


def plan_of(raw: dict, *, jobs: int = 1, store: Points | None = None) -> dict:
    with Points(None) if store is None else store as points, open_pool(jobs=jobs) as use:
        return make_plan(from_mapping(raw), use, points)


@pytest.fixture(scope="module")
def made() -> dict:
    return plan_of(planned())


@pytest.fixture(scope="module")
def brute() -> dict[int, list[str]]:
    """The verdict on every fleet of the small plan: by candidate, for 1, 2, ... replicas."""
    found = {}
    for candidate in enumerate_candidates(from_mapping(planned())):
        if not candidate.refused:
            rps = replica_rate(candidate.scenario)["rps"]
            found[candidate.index] = [confirm(candidate.scenario, n, rps, 0.95, 2, 4)["verdict"] for n in range(1, 6)]
    return found


def test_the_plan_is_that_of_brute_force(made, brute):
    candidates = {candidate.index: candidate for candidate in enumerate_candidates(from_mapping(planned()))}
    cost = {i: (verdicts.index("feasible") + 1) * candidates[i].usd_per_replica_h for i, verdicts in brute.items() if "feasible" in verdicts}
    best = made["plans"][0]
    assert best["feasible"] and best["cost_per_hour_usd"] == pytest.approx(min(cost.values()))
    by_config = {json.dumps(candidate.config, sort_keys=True): candidate.index for candidate in candidates.values()}
    for row in made["plans"]:
        config = {key: value for key, value in row["config"].items() if key != "replicas"}
        index = by_config[json.dumps(config, sort_keys=True)]
        if row["feasible"]:
            assert row["cost_per_hour_usd"] == pytest.approx(cost[index]), "the fewest replicas of that candidate"
        elif row["status"] == "dominated":
            assert row["cost_per_hour_usd"] <= cost[index] + 1e-9, "at least means at least"
        elif row["status"] == "infeasible":
            assert index not in cost
    found = sorted(row["cost_per_hour_usd"] for row in made["plans"] if row["feasible"])
    assert found[:3] == pytest.approx(sorted(cost.values())[:3]), "the top of the ranking is the top"


def test_more_replicas_never_turn_a_fleet_infeasible(brute):
    for verdicts in brute.values():
        held = [verdict == "feasible" for verdict in verdicts]
        assert held == sorted(held), verdicts


def test_workers_do_not_matter(made):
    assert json.dumps(plan_of(planned(), jobs=2)) == json.dumps(made)


@pytest.mark.parametrize("columns", [80, 100, 240])
def test_no_word_is_cut_at_any_width_of_the_terminal(made, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Terminal()
    print_plan(made, shown)
    lines = shown.lines()
    assert max(map(len, lines)) <= columns and not any("\u2026" in line for line in lines)
    feasible = [row["name"] for row in made["plans"] if row["feasible"]]
    assert all(sum(name in line for line in lines) for name in feasible)
    words = {word for key in ("headline", "breaks_first", "advice", "rest") for text in made[key] for word in text.split()}
    assert words <= set(" ".join(lines).split()), "no word of the advice is broken"


def test_the_figures_are_those_of_a_run(made):
    best = made["plans"][0]
    overrides = [f"{path}={json.dumps(value)}" for path, value in best["settings"].items()] + [f"cluster.replicas={best['config']['replicas']}"]
    summary = simulate(from_mapping(SMALL, overrides), records=False).summary
    assert best["goodput_rps"] == summary["goodput_rps"] and best["ttft_p99_s"] == summary["ttft_s"]["p99"]
    assert best["load_factor_interval"][0] < summary["load_factor"] < best["load_factor_interval"][1]
    assert best["usd_per_million_output_tokens"] * best["output_tokens_per_usd"] == pytest.approx(1e6)
    assert best["slo_attainment_interval"][0] >= 0.9 and best["goodput_rps_per_gpu"] * best["gpus"] == pytest.approx(best["goodput_rps"])
    assert {"config", "feasible", "binding_limit", "cost_per_hour_usd", "usd_per_million_output_tokens", "goodput_rps", "load_factor"} <= set(made["plans"][-1])


def test_headroom_lies_between_what_holds_and_what_does_not(made):
    base = from_mapping(SMALL, [f"{path}={json.dumps(value)}" for path, value in made["plans"][0]["settings"].items()])
    replicas = made["plans"][0]["config"]["replicas"]
    found = headroom(base.resolved(), replicas, None, 0.1)
    fleet = with_replicas(base, replicas)
    attained = [simulate(scaled(fleet, scale), records=False).summary["slo_attainment"]["overall"] for scale in (found["scale"], found["breaks_at"])]
    assert attained[0] >= 0.9 > attained[1] and found["breaks_at"] / found["scale"] <= 1.02 and " asked are " in found["why"]
    assert found["ttft_p99_range_s"][0] < found["ttft_p99_range_s"][1]


@pytest.mark.parametrize(
    ("candidates", "limit"),
    [
        ({"max_batch_tokens": [128], "max_batch_seqs": [256]}, "max_batch_tokens: 128 tokens a step leave some of 256 sequences without one"),
        ({"max_batch_tokens": [512], "max_chunk_tokens": [1024]}, "max_chunk_tokens: a chunk of 1024 tokens exceeds the 512 of a step"),
        ({"tensor_parallel": [3]}, "tensor_parallel: 3 "),
        ({"llms": ["llama-3.1-70b"]}, "gpu_memory: llama-3.1-70b does not fit"),
        ({"memory_fraction": [0.2]}, "gpu_memory: "),
        ({"gpus": ["h100-sxm"], "tensor_parallel": [16]}, "tensor_parallel: 16 GPUs exceed the 8"),
    ],
)
def test_the_impossible_is_refused_before_any_run(candidates, limit):
    found = enumerate_candidates(from_mapping(planned(candidates=candidates)))
    assert all(candidate.refused.startswith(limit) for candidate in found), found[0].refused
    made = plan_of(planned(candidates=candidates))
    assert not made["plans"][0]["feasible"] and made["searched"]["evaluations"] == 0
    assert made["plans"][0]["binding_limit"].startswith(limit) and any(limit.split(": ")[0] in line for line in made["rest"])


def test_a_budget_is_a_limit():
    made = plan_of(planned(budget_usd_per_h=1.6, candidates={"gpus": ["l40s"], "tensor_parallel": [1, 2]}))
    one, two = (next(row for row in made["plans"] if row["config"]["tensor_parallel"] == tp) for tp in (1, 2))
    assert one["cost_per_hour_usd"] <= 1.6 and two["status"] == "refused" and two["binding_limit"].startswith("budget: 1 replicas cost")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo": {}}, "states no objective"),
        ({"slo": {"default": {"ttft_ms": 500, "e2e_ms": 100}}}, "contradicts itself"),
        ({"slo": {"attainment": 1, "default": {"ttft_ms": 500}}}, "cannot be shown"),
        ({"slo": {"attainment": 0, "default": {"ttft_ms": 500}}}, "met by every fleet"),
        ({"plan": {"candidates": {"gpus": []}}}, "plan.candidates.gpus: must not be empty"),
        ({"plan": {"candidates": {"gpus": ["h100-smx"]}}}, "did you mean 'h100-sxm'?"),
        ({"plan": {"candidates": {"weight_dtype": ["fp9"]}}}, "'fp9' is not known"),
        ({"plan": {"candidates": {"other": {"policy.ordring": ["fcfs"]}}}}, "did you mean 'ordering'?"),
        ({"plan": {"candidates": {}, "replicas": {"min": 3, "max": 2}}}, "min is larger than max"),
        ({"plan": {"candidates": {}, "quality": {"fp8": 1}}}, "has no score for 'bf16'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, tmp_path, changes, message):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**planned(), **changes}))
    code = twinserve.main(["plan", str(tmp_path / "plan.yaml"), "--jobs", "1"])
    out, err = capsys.readouterr()
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""


def test_a_load_that_follows_capacity_cannot_be_planned_for():
    raw = copy.deepcopy(planned())
    raw["workload"]["arrivals"] = {"process": "poisson", "load_factor": 0.5}
    with pytest.raises(InputError, match="follow whatever fleet"):
        plan_of(raw)


def test_the_command_says_no_with_exit_1_and_goes_on_where_it_was_interrupted(capsys, tmp_path, monkeypatch):
    raw = planned(candidates={"gpus": ["l40s"]}, replicas={"min": 1, "max": 1})
    raw["slo"]["default"] = {"ttft_ms": 1}
    (tmp_path / "no.yaml").write_text(yaml.safe_dump(raw))
    assert twinserve.main(["plan", str(tmp_path / "no.yaml"), "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "no fleet keeps" in out and "asked are 1 ms" in out and out.isascii()


def test_an_interrupted_plan_keeps_its_evaluations(tmp_path, made):
    class Enough(Points):
        def add(self, key, value):
            super().add(key, value)
            if len(self) == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_of(planned(), store=Enough(tmp_path))
    with Points(tmp_path) as store:
        assert len(store) == 5
    assert json.dumps(plan_of(planned(), store=Points(tmp_path))) == json.dumps(made)


def test_optuna_tries_some_and_repeats_itself():
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'twinserve[study]'")
    raw = planned(search={"method": "optuna", "trials": 6})
    made = plan_of(raw)
    assert made["plans"][0]["feasible"] and 1 <= made["searched"]["candidates"] <= 6
    assert json.dumps(made) == json.dumps(plan_of(raw))


def test_a_trace_is_decided_without_chance(tmp_path):
    rows = "".join(f"2023-11-16 18:{15 + i // 60:02d}:{i % 60:02d}.0000000,{200 + i % 50},{20 + i % 7}\n" for i in range(240))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    raw = planned(candidates={"gpus": ["l40s"]})
    raw["workload"] = {"trace": {"file": str(tmp_path / "trace.csv")}}
    made = plan_of(raw)
    assert made["plans"][0]["feasible"] and made["plans"][0]["replications"] == 1 and "on this trace" in made["headline"][0]


def test_users_in_a_closed_loop_can_be_planned_for():
    raw = copy.deepcopy(planned(candidates={"gpus": ["l40s"]}, replicas={"min": 1, "max": 3}))
    raw["workload"] |= {"requests": 150, "arrivals": {"process": "closed_loop", "users": 12}}
    made = plan_of(raw)
    assert made["plans"][0]["feasible"] and made["plans"][0]["load_factor"] is None


# -- decisions ----------------------------------------------------------------------------------------------------------


def test_wilson_by_hand():
    low, high = wilson(95, 100, 0.975)
    assert (low, high) == pytest.approx((0.88825, 0.97846), abs=1e-5)
    assert wilson(0, 0, 0.95) == (0.0, 1.0)


def test_the_wider_interval_counts():
    assert attainment([(100, 100), (100, 100)], 0.95).low == pytest.approx(wilson(200, 200, 0.95)[0])
    assert attainment([(990, 1000), (900, 1000)], 0.95).low < 0.7, "replications that disagree say little"


def test_a_verdict_needs_its_interval_on_one_side():
    sure, unsure, bad = ({"a": (met, 10_000)} for met in (9990, 9902, 9000))
    assert decide([sure], 0.99, 0.95, exact=False, minimum=2) == "open"
    assert decide([sure, sure], 0.99, 0.95, exact=False, minimum=2) == "feasible"
    assert decide([unsure, unsure], 0.99, 0.95, exact=False, minimum=2) == "open"
    assert decide([bad, bad], 0.99, 0.95, exact=False, minimum=2) == "infeasible"
    assert decide([unsure], 0.99, 0.95, exact=True, minimum=2) == "feasible"
    two_classes = {"a": (9990, 10_000), "b": (5, 10), "empty": (0, 0)}
    assert decide([two_classes, two_classes], 0.99, 0.95, exact=False, minimum=2) == "infeasible"


def test_a_run_ends_early_only_when_it_is_lost():
    assert not refuted(19, 1000, 0.99, 0.95, exact=False) and refuted(25, 1000, 0.99, 0.95, exact=False)
    assert not refuted(10, 1000, 0.99, 0.95, exact=True) and refuted(11, 1000, 0.99, 0.95, exact=True)
    assert not refuted(1, 40, 0.99, 0.95, exact=False), "one of forty may be chance"


@given(st.integers(1, 40), st.integers(0, 45), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_the_fewest_replicas_are_found_from_any_guess(least, needed, spread, guess):
    most = least + spread
    first = max(least, min(guess, most))
    asked = []
    found = _fewest(lambda n: asked.append(n) or n >= needed, first, least, most)
    assert found == (None if needed > most else max(least, needed))
    assert all(least <= n <= most for n in asked)


def test_the_busiest_slice_holds_the_rush():
    raw = copy.deepcopy(SMALL)
    raw["workload"]["requests"] = None
    pieces = [{"until_s": 100.0, "rate_rps": 2.0}, {"until_s": 140.0, "rate_rps": 10.0}, {"until_s": 400.0, "rate_rps": 1.0}]
    raw["workload"]["arrivals"] = {"process": "piecewise", "pieces": pieces}
    found = measure(from_mapping(raw), 4096)
    assert 85 <= found.slice_s[0] < found.slice_s[1] <= 150 and found.peak_rps > 3 * found.mean_rps


@pytest.mark.parametrize("name", ["chat-8b", "azure-conversation", "benchmark-8b-closed-loop"])
def test_a_scaled_load_comes_that_much_faster(name):
    scenario = load(name)
    before, after = (measure(each, 4096) for each in (scenario, scaled(scenario, 2.0)))
    if before.requests:
        assert after.mean_rps == pytest.approx(2 * before.mean_rps, rel=0.1)
    else:
        assert scaled(scenario, 2.0).workload.closed_loop.users == 2 * scenario.workload.closed_loop.users


# -- operating points ---------------------------------------------------------------------------------------------------


def test_operating_points_of_the_three_way_front():
    rows = [
        {"feasible": True, "name": name, "config": {"name": name}, "quality": 100 - loss, "output_tokens_per_s": rate, "e2e_p99_s": p99 / 1000,
         "ttft_p99_s": 0.1, "tpot_p99_s": 0.01, "cost_per_hour_usd": 1.0}
        for name, loss, rate, p99 in (("low latency", 3.8, 42, 210), ("balanced", 1.9, 67, 380), ("accuracy", 0.7, 29, 640), ("beaten", 3.9, 41, 650))
    ]  # fmt: skip
    found = operating_points(rows, Select(best="quality", bounds={"e2e_p99_s": {"max": 0.4}}))
    assert [row["on_front"] for row in rows] == [True, True, True, False]
    assert found["selected"]["config"] == {"name": "balanced"} and found["lowest_latency"]["config"] == {"name": "low latency"}
    assert found["accuracy_first"]["config"] == {"name": "accuracy"} and found["most_throughput"]["config"] == {"name": "balanced"}
    none = operating_points(rows, Select(best="quality", bounds={"e2e_p99_s": {"max": 0.1}}))["selected"]
    assert none["config"] is None and "no fleet" in none["words"]


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_front_is_what_nothing_beats(points):
    table = np.array(points, dtype=float)
    smaller = [True, False, True]
    signed = table * np.where(smaller, 1, -1)
    for row, kept in zip(signed, front(table, smaller)):
        assert kept != any((other <= row).all() and (other < row).any() for other in signed)


def test_selection_takes_the_best_within_bounds():
    columns = {"a": np.array([1.0, 2.0, math.nan]), "b": np.array([5.0, 9.0, 1.0])}
    assert select(columns, "a", smaller_is_better=False, bounds={"b": (0, 6)}) == 0
    assert select(columns, "a", smaller_is_better=False, bounds={}) == 1
    assert select(columns, "a", smaller_is_better=True, bounds={"b": (20, 30)}) is None


def test_the_small_plan_covers_every_choice():
    assert len(enumerate_candidates(from_mapping(planned()))) == math.prod(len(values) for values in PLAN["candidates"].values())
