"""Releases: who gets the candidate, what lets it go on, what takes it back, and what each variant's users saw."""

from __future__ import annotations

import pytest
from drivers import request

from serving.catalog import load_gpu
from serving.errors import InputError
from serving.scenario import from_mapping, load
from sim.fleet import build_fleet, new_metrics, resolve_fleet
from sim.rollout import Release, reach
from sim.run import simulate

STAGES = [{"name": "tenth", "share": 0.1, "for_s": 30}, {"name": "half", "share": 0.5, "for_s": 30}]


def scenario(rollout: dict, **changes: object):
    workload = {
        "duration_s": 90.0, "arrivals": {"process": "poisson", "rate_rps": 20.0}, "prompt_tokens": {"dist": "lognormal", "median": 300, "sigma": 0.5, "max": 2000},
        "output_tokens": {"dist": "lognormal", "median": 60, "sigma": 0.4, "max": 300}, **changes.pop("workload", {}),
    }  # fmt: skip
    return from_mapping(
        {
            "name": "release", "llm": "llama-3.1-8b", "seed": 2, "max_model_len": 16384, "cluster": {"gpu": "h100-sxm", "replicas": 2},
            "workload": workload, "slo": {"attainment": 0.95, "default": {"ttft_ms": 400, "tpot_ms": 40}},
            "rollout": {"least": 30, "gates": {"ttft_p99_ratio": 2.0, "tpot_p99_ratio": 1.3}, **rollout}, **changes,
        }
    )  # fmt: skip


def run(rollout: dict, **changes: object) -> dict:
    return simulate(scenario(rollout, **changes)).summary


def test_a_candidate_like_the_baseline_is_promoted_and_its_share_is_what_stages_say():
    summary = run({"candidate": {}, "stages": STAGES})
    report = summary["rollout"]
    assert (report["outcome"], report["ended_s"]) == ("promoted", 60.0)
    assert [(row["name"], row["from_s"], row["to_s"], row["passed"]) for row in report["stages"]] == [
        ("tenth", 0.0, 30.0, True),
        ("half", 30.0, 60.0, True),
    ]
    for row, share in zip(report["stages"], (0.1, 0.5)):
        mine, base = row["candidate"]["outcomes"], row["baseline"]["outcomes"]
        assert mine / (mine + base) == pytest.approx(share, abs=0.06)
    variants = report["variants"]
    assert (
        variants["baseline"]["outcomes"] + variants["candidate"]["outcomes"]
        == summary["requests"]["arrived"]
        == summary["requests"]["completed"]
    )
    assert summary["load_factor"] is None
    assert simulate(scenario({"candidate": {}, "stages": STAGES}), stepwise=True).summary | {"events": 0} == summary | {"events": 0}


def test_a_slower_candidate_fails_the_comparison_and_is_taken_back():
    report = run({"candidate": {"step_time_factor": 1.5}, "stages": [STAGES[1], STAGES[0]]})["rollout"]
    assert report["outcome"] == "rolled_back" and report["ended_s"] == 30.0
    assert "p99 is " in report["reason"] and report["reason"].startswith("half: ")
    assert len(report["stages"]) == 1
    after = report["variants"]["candidate"]["outcomes"] - report["stages"][0]["candidate"]["outcomes"]
    assert after <= 30, "only what was under way, of 600 to come"


def test_a_candidate_that_burns_the_budget_is_taken_back_at_once():
    report = run({"candidate": {"step_time_factor": 8.0}, "stages": [{"name": "half", "share": 0.5, "for_s": 80}]})["rollout"]
    assert report["outcome"] == "rolled_back" and report["ended_s"] < 30.0
    assert "outcomes missed their objectives" in report["reason"]


def test_policies_of_the_candidate_are_its_own():
    refusing = {"policy": {"admission": {"name": "token_bucket", "tokens_per_s": 100.0, "burst_tokens": 2000.0}}}
    summary = run({"candidate": refusing, "stages": STAGES, "burn": 1000.0})
    report = summary["rollout"]
    assert report["outcome"] == "rolled_back" and "failed or were refused" in report["reason"]
    assert report["variants"]["baseline"]["failed"] == 0
    assert report["variants"]["candidate"]["failed"] == summary["requests"]["rejected"] > 0


def test_a_release_to_a_tenant_or_a_class_reaches_nobody_else():
    mixed = {"tenants": [{"name": "beta", "share": 0.3}, {"name": "rest", "share": 0.7}]}
    whole = [{"name": "all", "share": 1.0, "for_s": 80, "check": "smoke"}]
    report = run({"candidate": {}, "stages": whole, "tenants": ["beta"]}, workload=mixed)["rollout"]
    row = report["stages"][0]
    assert row["candidate"]["outcomes"] / (row["candidate"]["outcomes"] + row["baseline"]["outcomes"]) == pytest.approx(0.3, abs=0.05)
    assert report["outcome"] == "promoted"
    classes = {"classes": [{"name": "p0", "share": 0.2}, {"name": "p1", "share": 0.8}]}
    report = run({"candidate": {}, "stages": whole, "classes": ["p0"]}, workload=classes)["rollout"]
    assert report["variants"]["candidate"]["outcomes"] < 0.3 * report["variants"]["baseline"]["outcomes"]


def test_verification_is_a_probe_a_smoke_test_and_a_comparison():
    """System F6, in less time."""
    check = {"share": 0.3, "probe_s": 5.0, "smoke_s": 20.0, "comparison_s": 30.0}
    report = run({"candidate": {}, "verification": check})["rollout"]
    assert [(row["name"], row["check"], row["to_s"] - row["from_s"], row["passed"]) for row in report["stages"]] == [
        ("probe", "probe", 5.0, True), ("smoke", "smoke", 20.0, True), ("baseline comparison", "compare", 30.0, True),
    ]  # fmt: skip
    plain = scenario({"candidate": {}, "verification": {}}).rollout.all_stages()
    assert [stage.for_s for stage in plain] == [30.0, 300.0, 900.0]
    slow = run({"candidate": {"step_time_factor": 6.0}, "verification": check, "burn": 1000.0})["rollout"]
    assert slow["reason"].startswith("smoke: ") and "are asked" in slow["reason"]


def test_too_few_answers_decide_nothing_in_favour():
    report = run({"candidate": {}, "stages": [{"name": "drop", "share": 0.001, "for_s": 30}]})["rollout"]
    assert report["outcome"] == "rolled_back" and "too few" in report["reason"]


def test_replicas_change_over_with_the_share_and_the_fleet_costs_what_it_did():
    split, release = built(scenario({"candidate": {}, "stages": STAGES}, cluster={"gpu": "h100-sxm", "replicas": 8}))
    in_service = {}
    for share in (0.0, 0.01, 0.25, 0.5, 0.99, 1.0):
        release._give(share)
        in_service[share] = (split.baseline.online, split.candidate.online)
    assert in_service == {0.0: (8, 0), 0.01: (7, 1), 0.25: (6, 2), 0.5: (4, 4), 0.99: (1, 7), 1.0: (0, 8)}
    lone, release = built(scenario({"candidate": {}, "stages": STAGES}, cluster={"gpu": "h100-sxm", "replicas": 1}))
    release._give(0.1)
    assert (lone.baseline.online, lone.candidate.online) == (1, 1)
    plain = simulate(
        from_mapping({**scenario({"candidate": {}, "stages": STAGES}).resolved(), "rollout": {"candidate": {}, "stages": STAGES[:1]}})
    ).summary
    assert plain["cost_usd"] == pytest.approx(2 * plain["duration_s"] / 3600 * load_gpu("h100-sxm").price_usd_per_h)


def built(wanted):
    split = build_fleet(wanted, resolve_fleet(wanted), new_metrics(wanted))
    return split, Release([split], wanted.rollout, wanted.slo, 2, reach(wanted))


def test_sessions_stay_with_their_variant():
    split, release = built(scenario({"candidate": {}, "stages": STAGES}))
    chosen = {}
    for share in (0.1, 0.5, 1.0):
        release._share = share
        for turn in range(5):
            for session in range(200):
                chosen.setdefault((share, session), set()).add(split.chooses(request(1000 * turn + session, session=session)))
    assert all(len(answers) == 1 for answers in chosen.values())
    assert all(True in chosen[0.5, session] for session in range(200) if True in chosen[0.1, session]), "who has it keeps it"


@pytest.mark.parametrize(
    ("rollout", "changes", "message"),
    [
        ({"candidate": {}}, {}, "needs the key 'stages'"),
        ({"stages": STAGES}, {}, "rollout.candidate"),
        ({"candidate": {"policy": {"ordering": "fcsf"}}, "stages": STAGES}, {}, "fcfs"),
        (
            {"candidate": {}, "stages": STAGES},
            {"faults": {"events": [{"kind": "host_stall", "at_s": 1.0, "for_s": 1.0}]}},
            "cannot be combined",
        ),
    ],
)
def test_mistakes_are_told(rollout, changes, message):
    with pytest.raises(InputError, match=message):
        run(rollout, **changes)


def test_the_scenario_shows_the_roll_back():
    summary = simulate(load("canary", ["workload.duration_s=400"])).summary
    assert summary["rollout"]["outcome"] == "rolled_back"
    assert [row["passed"] for row in summary["rollout"]["stages"]] == [True, True, False]
