"""Scenarios of changing fleets, from YAML to summary.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.scenario import from_mapping, load
from serving.scenario.dynamics import ColdStart
from sim.attach import cold_start_stages
from sim.faults import recovery_s
from sim.fleet import resolve
from sim.run import simulate

HOME = Path(__file__).parents[2]
SMALL = {
    "name": "small", "llm": "llama-3.1-8b", "seed": 3, "max_model_len": 16384, "cluster": {"gpu": "h100-sxm", "replicas": 2},
    "workload": {
        "duration_s": 60.0, "arrivals": {"process": "poisson", "rate_rps": 8.0}, "prompt_tokens": {"dist": "lognormal", "median": 400, "sigma": 0.5, "max": 2000},
        "output_tokens": {"dist": "lognormal", "median": 100, "sigma": 0.5, "max": 500},
    },
    "slo": {"default": {"ttft_ms": 500, "tpot_ms": 50}},
}  # fmt: skip


def scenario(**changes: object):
    return from_mapping({**SMALL, **changes})


def faults(*events: dict, **options: object) -> dict:
    return {"events": list(events), **options}


def test_a_run_with_faults_reports_them_and_pays_for_what_was_there():
    events = (
        {"kind": "replica_loss", "at_s": 20.0, "for_s": 5.0, "replica": 1},
        {"kind": "slow_gpu", "at_s": 40.0, "for_s": 5.0, "replica": 0, "factor": 3.0},
    )
    cold = {"schedule_s": 1.0, "compile_s": 2.0, "graph_capture_s": 3.0, "warmup_s": 0.5, "weights_bytes_per_s": 16.06e9}
    summary = simulate(scenario(faults=faults(*events, window_s=5.0, cold_start=cold))).summary
    fleet = summary["fleet"]
    assert [row["state"] for row in fleet["changes"]] == ["lost", "starting", "ready"]
    took_s = fleet["changes"][2]["at_s"] - fleet["changes"][1]["at_s"]
    assert took_s == pytest.approx(sum(fleet["cold_start_s"].values())) and took_s == pytest.approx(1 + 2 + 3 + 0.5 + 1.0, abs=0.01)
    assert [(row["kind"], row["replica"]) for row in fleet["faults"]] == [("replica_loss", 1), ("slow_gpu", 0)]
    assert fleet["retried"] > 0 and fleet["failed"] == 0
    assert summary["requests"]["completed"] == summary["requests"]["arrived"]
    assert fleet["provisioned_replica_s"] == pytest.approx(2 * summary["duration_s"])
    assert summary["cost_usd"] == pytest.approx(2 * summary["duration_s"] / 3600 * load_gpu("h100-sxm").price_usd_per_h)


def test_cost_and_use_are_of_the_replicas_that_were_paid():
    scaling = {"policy": {"name": "queue_depth", "tokens_per_replica": 1e9}, "maximum": 4, "interval_s": 5.0}
    scaled = simulate(scenario(cluster={"gpu": "h100-sxm", "replicas": 1, "autoscaling": scaling})).summary
    fixed = simulate(scenario(cluster={"gpu": "h100-sxm", "replicas": 1})).summary
    for key in ("cost_usd", "gpu_busy_fraction", "kv_utilisation", "load_factor", "ttft_s", "requests"):
        assert scaled[key] == pytest.approx(fixed[key]), key


def test_weights_cross_the_host_link_at_what_it_reaches():
    parts = resolve(scenario())
    link = load_gpu("h100-sxm").pcie
    stages = cold_start_stages(parts, ColdStart())
    assert stages["weights"] == pytest.approx(load_llm("llama-3.1-8b").weight_bytes(None, 1) / (link.bytes_per_s * link.efficiency))
    assert list(stages) == ["schedule", "weights", "compile", "graph_capture", "warmup"]


def test_pools_take_faults_and_slow_links():
    pools = {"gpu": "h200-sxm", "topology": "dgx-h200", "pools": [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 2}]}
    events = (
        {"kind": "replica_loss", "at_s": 20.0, "for_s": 1.0, "replica": 2},
        {"kind": "slow_link", "at_s": 30.0, "for_s": 5.0, "factor": 0.1, "link": "gpu0"},
    )
    summary = simulate(scenario(cluster=pools, faults=faults(*events))).summary
    assert [(row["kind"], row.get("replica"), row.get("link")) for row in summary["fleet"]["faults"]] == [
        ("replica_loss", 2, None),
        ("slow_link", None, "gpu0"),
    ]
    assert summary["requests"]["completed"] == summary["requests"]["arrived"]
    assert set(summary["fleet"]["cold_start_s"]) == {"prefill", "decode"}


MISTAKES = [
    ({"kind": "slow_gpu", "at_s": 1.0, "for_s": 1.0}, "needs the key 'factor'"),
    ({"kind": "slow_gpu", "at_s": 1.0, "for_s": 1.0, "factor": 0.5}, "at least 1 for a slow_gpu"),
    ({"kind": "slow_link", "at_s": 1.0, "for_s": 1.0, "factor": 2.0, "link": "x"}, "at most 1 for a slow_link"),
    ({"kind": "slow_link", "at_s": 1.0, "for_s": 1.0, "factor": 0.5}, "needs the key 'link'"),
    ({"kind": "slow_link", "at_s": 1.0, "for_s": 1.0, "factor": 0.5, "link": "x"}, "nothing crosses a link"),
    ({"kind": "replica_loss", "at_s": 1.0, "for_s": 1.0, "factor": 2.0}, "'factor' means nothing to a replica_loss"),
    ({"kind": "replica_loss", "at_s": 1.0, "every_s": 2.0, "for_s": 1.0}, "exactly one of at_s and every_s"),
    ({"kind": "replica_loss", "at_s": 1.0, "for_s": 1.0, "replica": 2}, "there is no replica 2"),
    ({"kind": "host_stall", "every_s": 1.0, "for_s": 1.0}, "every_s must exceed for_s"),
    ({"kind": "earthquake", "at_s": 1.0, "for_s": 1.0}, "not known"),
]


@pytest.mark.parametrize(("event", "message"), MISTAKES)
def test_mistakes_are_told_before_anything_runs(event, message):
    with pytest.raises(InputError, match=message):
        simulate(scenario(faults=faults(event)))


def test_recovery_is_told_from_windows_of_arrivals():
    windows = [(0.0, 100, 99), (10.0, 100, 80), (20.0, 0, 0), (30.0, 100, 90), (40.0, 100, 100), (50.0, 100, 50)]
    assert recovery_s([12.0], windows, 0.99, 10.0) == [28.0], "the first good window after a bad one begins at 40"
    assert recovery_s([12.0], windows, 0.9, 10.0) == [18.0], "a window without requests says nothing"
    assert recovery_s([1.0], windows[:1], 0.99, 10.0) == [0.0], "never missed"
    assert recovery_s([12.0, 35.0, 45.0], windows, 0.95, 10.0) == [None, 5.0, None], "each until the next; the last never"
    assert recovery_s([12.0, 12.0], windows, 0.99, 10.0) == [28.0, 28.0], "two at once share what follows"
    assert recovery_s([], windows, 0.99, 10.0) == [] and recovery_s([5.0], [], 0.99, 10.0) == [0.0]


def test_the_scenario_of_lost_replicas_retries_what_was_lost():
    summary = simulate(load("replica-loss", ["workload.duration_s=200", "workload.arrivals.load_factor=0.3"])).summary
    assert [(row["kind"], row["replica"]) for row in summary["fleet"]["faults"]] == [("replica_loss", 1)]
    assert summary["fleet"]["retried"] > 0
    assert summary["requests"]["completed"] == summary["requests"]["arrived"]


def test_the_scenario_of_autoscaling_buys_for_the_rush_and_gives_back():
    pieces = [{"until_s": 60, "rate_rps": 5}, {"until_s": 180, "rate_rps": 60}, {"until_s": 240, "rate_rps": 5}]
    summary = simulate(load("autoscaling", ["workload.duration_s=240", f"workload.arrivals.pieces={json.dumps(pieces)}"])).summary
    assert {"starting", "ready"} <= {row["state"] for row in summary["fleet"]["changes"]}
    assert summary["duration_s"] < summary["fleet"]["provisioned_replica_s"] < 8 * summary["duration_s"]


def test_equal_bytes_whatever_the_hash_seed():
    code = (
        "import json, sys; sys.path[:0] = ['tests/sim', 'tests/serving']\n"
        "from test_dynamics import Erratic; from changing_fleets import *; from drivers import *\n"
        "case = random_case(5, replicas=3)\n"
        "changed = serve_changing(case, random_arrivals(5, case), faults=random_faults(5, 3), policy=Erratic(5), seed=5)\n"
        "print(json.dumps([changed.served.summary, changed.fleet.ledger.changes, changed.told]))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=HOME, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and outputs.pop()
