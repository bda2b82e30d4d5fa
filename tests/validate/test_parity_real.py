"""Real engine runs on the CPU: decisions replay one by one, instants are the simulator's to the last bit, and the commands agree."""

from __future__ import annotations

import json

import pytest
import yaml

pytest.importorskip("torch", reason="the engine's extra is not installed")

import torch

import twinserve
from engine.build import Choices, build_engine, reference_step
from engine.clocks import NormalisedClock, RealClock
from engine.run import serve_scenario
from serving.errors import InputError
from serving.records import open_run
from serving.scenario import load
from validate.parity import parity
from validate.rerun import differences

LLM = {
    "name": "decoder-2x64", "source": "made up", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96,
    "vocab": 128, "max_model_len": 128, "weight_dtype": "fp32",
}  # fmt: skip
POLICIES = {
    "fcfs": {},
    "strict priorities": {"ordering": {"name": "priority", "preempt": "strict"}, "preemption": "lowest_priority"},
    "shortest first, prefill first": {"ordering": "shortest_job", "batching": {"name": "prefill_first", "head_of_line": "skip"}},
    "whole prompts, fixed window": {"batching": {"name": "whole_prompt", "window": {"name": "fixed", "window_s": 0.02, "size": 3}}, "preemption": "least_progress"},
    "affinity, adaptive window": {"ordering": "cache_affinity", "batching": {"name": "chunked_prefill", "window": {"name": "rtt_adaptive", "shortest_s": 0.002}}},
    "one step ahead": {"batching": {"name": "chunked_prefill", "max_in_flight": 2}},
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A scenario file on a network so small that a step takes about a millisecond."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "llm.yaml").write_text(yaml.safe_dump(LLM))
    raw = {
        "version": 1, "seed": 4, "llm": "llm.yaml", "max_model_len": 64, "cluster": {"gpu": "h100-sxm"},
        "kv_cache": {"block_tokens": 4, "blocks": 44},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_tokens": 32, "max_batch_seqs": 8}},
        "workload": {
            "requests": 40, "arrivals": {"process": "poisson", "rate_rps": 150.0}, "prompt_tokens": {"dist": "uniform", "min": 4, "max": 40},
            "output_tokens": {"dist": "uniform", "min": 4, "max": 24}, "prefix": {"groups": 3, "tokens": {"dist": "constant", "value": 12}},
            "classes": [{"name": "p0", "priority": 0}, {"name": "p1", "priority": 1, "share": 2.0}],
        },
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def with_policy(path, policy):
    """The scenario with another policy; the budgets stay."""
    raw = yaml.safe_load(path.read_text())
    batching = {**raw["policy"]["batching"], **policy.get("batching", {})}
    raw["policy"] = {**policy, "batching": batching}
    other = path.with_name("other.yaml")
    other.write_text(yaml.safe_dump(raw))
    return load(other)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_real_run_is_in_parity_and_simulated_to_the_last_bit(policy, tiny, tmp_path):
    scenario = with_policy(tiny, policy)
    run = serve_scenario(scenario, build_engine(scenario, Choices(device="cpu")), RealClock(), out=tmp_path / "run")
    assert run.summary["requests"]["completed"] == 40
    result = parity(tmp_path / "run")
    assert result.differing_plans == 0 and result.plans > 50, result.first_difference
    assert differences(tmp_path / "run", stepwise=True) == [] == differences(tmp_path / "run", stepwise=False)


def test_the_host_and_the_device_share_the_whole_step(tiny, tmp_path):
    scenario = load(tiny)
    serve_scenario(scenario, build_engine(scenario, Choices(device="cpu")), RealClock(), out=tmp_path / "run")
    table = open_run(tmp_path / "run").engine_steps
    parts = table[["schedule_s", "prepare_s", "launch_s", "sample_s", "post_s", "device_s"]]
    assert (parts >= 0).all().all() and (table["path"] == "eager").all()
    busy = table["measured_s"].quantile(0.9)
    usual = table["measured_s"] < busy  # a step after a pause begins with its arrival, before anything was measured
    assert parts[usual].sum().sum() == pytest.approx(table["measured_s"][usual].sum(), rel=0.25)


def test_the_normalised_clock_skips_the_waits_and_keeps_the_arrivals(tiny, tmp_path):
    scenario = load(tiny, ["workload.arrivals.rate_rps=2.0", "workload.requests=12"])
    engine = build_engine(scenario, Choices(device="cpu"))
    run = serve_scenario(scenario, engine, NormalisedClock(reference_step(engine.runner), 0.001), out=tmp_path / "run")
    table = open_run(tmp_path / "run")
    assert run.summary["duration_s"] > 3 and (table.engine_steps["reference_s"] > 0).all()
    assert parity(tmp_path / "run").differing_plans == 0 and differences(tmp_path / "run", stepwise=True) == []


def call(capsys, *arguments):
    code = twinserve.main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_run_then_parity_then_calibrate_then_simulate(capsys, tiny, tmp_path):
    more = ["--set", "workload.requests=150", "--set", "kv_cache.prefix_caching=false"]
    code, out, err = call(capsys, "engine", "run", tiny, "--out", tmp_path / "run", "--clock", "normalised", "--reference-ms", "1", *more)
    assert code == 0 and "150 of 150 requests completed" in out, err
    code, out, _ = call(capsys, "parity", tmp_path / "run", "--json")
    assert code == 0 and json.loads(out)["differing_plans"] == 0
    code, out, err = call(capsys, "calibrate", tmp_path / "run", "--out", tmp_path / "fit.yaml", "--json")
    result = json.loads(out)
    assert code == (0 if result["accepted"] else 2), err  # a machine may be too busy to be measured: then it must say so
    if result["accepted"]:
        code, out, err = call(capsys, "run", tiny, "--json", "--set", f"latency={{name: fitted, file: '{tmp_path / 'fit.yaml'}', transfer: true}}", *more)
        assert code == 0 and json.loads(out)["requests"]["completed"] == 150, err


def test_a_run_that_differs_is_exit_1(capsys, tiny, tmp_path):
    scenario = load(tiny)
    serve_scenario(scenario, build_engine(scenario, Choices(device="cpu")), RealClock(), out=tmp_path / "run")
    path = tmp_path / "run" / "run.yaml"
    path.write_text(path.read_text().replace("blocks: 44", "blocks: 40"))
    code, out, _ = call(capsys, "parity", tmp_path / "run")
    assert code == 1 and "plans differ, first in step" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "cluster.replicas=2"], "one engine is one replica"),
        (["--set", "cluster.tensor_parallel=2", "--set", "policy.sharding=layer"], "the engine runs on one GPU"),
        (["--set", "cluster.tensor_parallel=8"], "does not divide"),
        (["--set", "kv_cache.tiers=[{name: host, gib: 0.0000001}]"], "hold no page"),
        (["--set", "weights={streaming: {resident: 0.5}}"], "the engine does not do this"),
        (["--set", "adapters={slots: 2}", "--set", "cluster.tensor_parallel=2"], "applies adapters on one device"),
        (["--set", "adapters={slots: 2}", "--set", "workload.adapters={names: [a]}", "--adapters", "/nowhere"], "holds no adapter 'a'"),
        (["--set", "workload.retry={}"], "workload.retry: the engine does not do this"),
        (["--skip-experts-below", "1.5"], "no fraction"),
        (["--clock", "reel"], "did you mean 'real'"),
        (["--dtype", "fp61"], "did you mean 'fp16'"),
        (["--set", "kv_cache.blocks=900000000"], "does not fit"),
        (["--set", "policy.batching.max_in_flight=3"], "at most one step ahead"),
        (["--reference-ms", "0", "--clock", "normalised"], "no time above 0"),
        (["--weights", "/nowhere"], "is no folder"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line_and_exit_2(capsys, tiny, tmp_path, arguments, message):
    code, out, err = call(capsys, "engine", "run", tiny, "--device", "cpu", "--out", tmp_path / "run", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and not out and not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tiny):
    with pytest.raises(InputError, match="there is no CUDA GPU here"):
        build_engine(load(tiny), Choices(device="cuda"))


def test_a_profile_is_read_by_calibrate_and_goes_on_when_asked_again(capsys, tiny, tmp_path):
    command = ["engine", "profile", tiny, "--device", "cpu", "--out", tmp_path / "shapes", "--target", "0.9", "--reference-ms", "1"]
    code, out, err = call(capsys, *command, "--budget-s", "0.2")
    assert code == 0 and "steps known within 90%" in out, err
    first = len(open_run(tmp_path / "shapes").steps)
    code, _, err = call(capsys, *command, "--budget-s", "3")
    assert code == 0 and len(open_run(tmp_path / "shapes").steps) > first, err
    code, _, err = call(capsys, "calibrate", tmp_path / "shapes", "--out", tmp_path / "fit.yaml")
    assert code in (0, 2) and ("refused" in err) == (code == 2)
    code, _, err = call(capsys, *command, "--reference-ms", "2")
    assert code == 2 and "holds measurements of other facts" in err
