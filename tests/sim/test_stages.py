"""Stages before the model: exact times where service is exact, Erlang's formula where it is exponential, and nobody lost."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_queueing_theory import assert_mean, poisson

from serving.errors import InputError
from serving.records import open_run
from serving.scenario import from_mapping
from serving.scenario.stages import FrontStage
from sim.run import simulate
from sim.stages import Station
from sim.trace_out import write_run_trace
from validate import queueing
from validate.explain import attribute, timelines
from validate.run_data import read_run

WORKLOAD = {"requests": 300, "arrivals": {"process": "poisson", "rate_rps": 20.0}, "prompt_tokens": {"dist": "uniform", "min": 16, "max": 600},
            "output_tokens": {"dist": "uniform", "min": 2, "max": 40}}  # fmt: skip
FEATURES = {"name": "features", "service_s": {"dist": "exponential", "mean": 0.02}, "servers": 2}
RETRIEVAL = {"name": "retrieval", "service_s": {"dist": "constant", "value": 0.03}, "share": 0.5, "adds_tokens": {"dist": "uniform", "min": 50, "max": 200}}


def scenario(stages: list[dict], workload: dict | None = None, **changes: object):
    raw = {"name": "stages", "llm": "qwen2.5-0.5b", "max_model_len": 4096, "cluster": {"gpu": "h100-sxm", "replicas": 2}, "stages": stages,
           "workload": WORKLOAD | (workload or {}), **changes}  # fmt: skip
    return from_mapping(raw)


def exponential(servers: int, mean: float = 0.1) -> FrontStage:
    return FrontStage(name="s", service_s={"dist": "exponential", "mean": mean}, servers=servers)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 0.8)])
def test_a_stage_waits_as_erlangs_formula_says(servers, load):
    station, mean_s = Station(exponential(servers), "", 5), 0.1
    rate_rps = load * servers / mean_s
    waits = np.array([station.enter(t)[0] - t for t in poisson(rate_rps, 40_000, seed=4).tolist()])
    assert_mean(waits, queueing.mmc(rate_rps, mean_s, servers).wait_s)


def test_exact_service_is_exact():
    station = Station(FrontStage(name="s", service_s={"dist": "constant", "value": 0.1}, servers=2), "", 0)
    times = [time for t in (0.0, 0.0, 0.0, 0.05, 1.0) for time in station.enter(t)]
    assert times == pytest.approx([0, 0.1, 0, 0.1, 0.1, 0.2, 0.1, 0.2, 1.0, 1.1])
    assert station.busy_s == pytest.approx(0.5) and station.requests == 5


def test_a_stage_delays_the_first_token_by_its_service_and_nothing_else():
    rare = {"requests": 20, "arrivals": {"process": "constant", "rate_rps": 0.5}}
    plain, staged = (simulate(scenario(stages, rare)).summary for stages in ([], [{"name": "s", "service_s": {"dist": "constant", "value": 0.25}}]))
    for key in ("mean", "p50", "max"):
        assert staged["ttft_s"][key] == pytest.approx(plain["ttft_s"][key] + 0.25, rel=2e-3)
    assert staged["tpot_s"] == pytest.approx(plain["tpot_s"])
    assert "stages" not in plain and plain["load_factor"] is not None and staged["load_factor"] is None


def test_a_stage_behind_the_answer_delays_whoever_waits_for_it_and_no_token(tmp_path):
    rare = {"requests": 20, "arrivals": {"process": "constant", "rate_rps": 0.5}}
    post = {"name": "post", "after_answer": True, "service_s": {"dist": "constant", "value": 0.25}}
    plain, staged = (simulate(scenario(stages, rare)).summary for stages in ([], [post]))
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        assert staged[metric] == plain[metric]
    assert staged["done_s"]["mean"] == pytest.approx(staged["e2e_s"]["mean"] + 0.25, rel=1e-6) and "done_s" not in plain
    assert staged["duration_s"] == pytest.approx(plain["duration_s"] + 0.25) and staged["stages"][0]["requests"] == 20
    users = {"requests": 40, "arrivals": {"process": "closed_loop", "users": 1}}
    alone, behind = (simulate(scenario(stages, users), out=tmp_path / str(len(stages))).summary["duration_s"] for stages in ([], [post]))
    assert behind == pytest.approx(alone + 40 * 0.25, rel=1e-3), "the next question waits for it"
    data = read_run(tmp_path / "1")
    found = attribute(data, "e2e_s")
    assert found.parts_s.sum(axis=1) == pytest.approx(found.whole_s, abs=1e-9) and found.parts_s[:, :2].sum() == 0


def test_every_request_passes_every_stage_once_and_in_order(tmp_path):
    result = simulate(scenario([FEATURES, {**RETRIEVAL, "share": 1.0}]), out=tmp_path / "run")
    run = open_run(tmp_path / "run")
    rows = run.stages.sort_values(["request_id", "entered_s"])
    assert rows.groupby("request_id")["stage"].agg(tuple).map(lambda names: names == ("features", "retrieval")).all()
    assert len(rows) == 600 and result.summary["requests"]["completed"] == 300
    first, second = rows[rows["stage"] == "features"], rows[rows["stage"] == "retrieval"]
    requests = run.requests
    assert (first["entered_s"].to_numpy() == requests["arrival_s"].to_numpy()).all()
    assert (second["entered_s"].to_numpy() == first["ended_s"].to_numpy()).all()
    assert (requests["scheduled_s"].to_numpy() >= second["ended_s"].to_numpy()).all()
    assert [row["requests"] for row in result.summary["stages"]] == [300, 300]


def test_share_and_classes_say_who_comes_and_added_tokens_are_prompt_tokens():
    classes = [{"name": "rag", "share": 0.5}, {"name": "chat", "share": 0.5}]
    stages = [{**RETRIEVAL, "classes": ["rag"], "share": 1.0, "adds_tokens": {"dist": "constant", "value": 1000}}]
    plain, staged = (simulate(scenario(given, {"classes": classes})).summary for given in ([], stages))
    went = staged["stages"][0]["requests"]
    assert 110 < went < 190
    tokens = [summary["prompt_tokens_per_s"] * summary["duration_s"] for summary in (plain, staged)]
    assert tokens[1] - tokens[0] == pytest.approx(1000 * went)


def test_room_is_left_for_what_stages_add():
    long = {"prompt_tokens": {"dist": "constant", "value": 3080}, "output_tokens": {"dist": "constant", "value": 40}}
    added = [{**RETRIEVAL, "share": 1.0, "adds_tokens": {"dist": "constant", "value": 1000}}]
    summary = simulate(scenario(added, long)).summary
    assert summary["output_tokens_per_s"] * summary["duration_s"] == pytest.approx(300 * 16)  # 3,080 + 1,000 + 16 = 4,096


@pytest.mark.parametrize("workload", [{}, {"sessions": {"turns": {"dist": "constant", "value": 3}}}, {"arrivals": {"process": "closed_loop", "users": 8}}])
def test_fast_equals_stepwise_behind_stages(workload):
    asked = scenario([FEATURES, RETRIEVAL], workload)
    fast, stepwise = simulate(asked).summary, simulate(asked, stepwise=True).summary
    assert fast | {"events": 0} == stepwise | {"events": 0}
    assert fast["requests"]["completed"] == fast["requests"]["arrived"] == 300


def test_a_fleet_that_changes_behind_stages_loses_nobody():
    faults = {"events": [{"kind": "replica_loss", "at_s": 1.0, "for_s": 0.2, "replica": 0}], "cold_start": {"schedule_s": 0.1}}
    summary = simulate(scenario([FEATURES], {"arrivals": {"process": "poisson", "rate_rps": 200.0}}, faults=faults)).summary
    assert summary["requests"]["completed"] == 300 and summary["fleet"]["retried"] > 0


def test_an_explanation_names_the_stage_and_adds_up(tmp_path):
    slow = {"name": "slow", "service_s": {"dist": "exponential", "mean": 0.09}, "servers": 2}
    simulate(scenario([FEATURES, slow]), out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    for metric in ("ttft_s", "e2e_s", "tpot_s"):
        found = attribute(run, metric, curves=timelines(run))
        assert found.parts_s.sum(axis=1) == pytest.approx(found.whole_s, abs=1e-9)
        if metric != "tpot_s":
            waited, served = found.parts_s[:, 0].sum(), found.parts_s[:, 1].sum()
            rows = run.stages
            assert waited == pytest.approx((rows["started_s"] - rows["entered_s"]).sum())
            assert served == pytest.approx((rows["ended_s"] - rows["started_s"]).sum())


def test_a_trace_shows_the_stages(tmp_path):
    simulate(scenario([FEATURES, RETRIEVAL]), out=tmp_path / "run")
    write_run_trace(tmp_path / "run", tmp_path / "trace.json")
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event.get("cat") == "stage"]
    begun = sum(event["ph"] == "b" for event in events)
    assert begun == sum(event["ph"] == "e" for event in events) and begun >= 450
    assert {event["name"] for event in events} == {"features", "retrieval", "waits"}


@pytest.mark.parametrize(
    ("stages", "where"),
    [
        ([{**FEATURES, "servers": 0}], "stages[0].servers"),
        ([FEATURES, FEATURES], "stages[1].name"),
        ([{**FEATURES, "name": "network"}], "stages[0].name"),
        ([{**FEATURES, "classes": ["rag"]}], "stages[0].classes[0]"),
        ([{**FEATURES, "serversx": 2}], "stages[0].serversx"),
        ([{"name": "s"}], "stages[0].service_s"),
        ([{**RETRIEVAL, "after_answer": True}], "stages[0]"),
        ([{**RETRIEVAL, "adds_tokens": {"dist": "exponential", "mean": 100}}], "stages[0].adds_tokens"),
        ([{**RETRIEVAL, "adds_tokens": {"dist": "constant", "value": 5000}}], "stages[0].adds_tokens"),
    ],
)
def test_a_mistake_names_its_place(stages, where):
    with pytest.raises(InputError) as caught:
        simulate(scenario(stages))
    assert caught.value.where.endswith(where)


def test_a_load_factor_needs_one_capacity():
    with pytest.raises(InputError, match="rate_rps"):
        scenario([FEATURES], {"arrivals": {"process": "poisson", "load_factor": 0.5}})
