"""Calibration from one run: known factors are found within their intervals, and a run that cannot show one is refused by its name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

import twinserve
from serving.catalog import load_gpu, read_entry
from serving.errors import InputError
from serving.scenario import from_mapping
from sim.run import simulate
from validate import single_run

TRUTH = (0.8, 0.9, 0.003)
MIXED = ({"dist": "lognormal", "median": 1500, "sigma": 0.8, "max": 8000}, {"dist": "lognormal", "median": 150, "sigma": 0.6, "max": 600})
TINY = ({"dist": "uniform", "min": 8, "max": 16}, {"dist": "uniform", "min": 30, "max": 60})


def scenario(lengths, rate_rps, gpu="h100-sxm", requests=160):
    prompts, outputs = lengths
    workload = {"requests": requests, "arrivals": {"process": "poisson", "rate_rps": rate_rps}, "prompt_tokens": prompts, "output_tokens": outputs}
    return {"version": 1, "name": "single", "seed": 3, "llm": "llama-3.1-8b", "cluster": {"gpu": gpu}, "workload": workload}


def served(tmp_path, lengths, rate_rps, requests=160):
    """The run of a server whose GPU differs from the catalogue's by TRUTH."""
    document, _ = read_entry("gpus", "h100-sxm", "gpu")
    gpu = tmp_path / "truth.yaml"
    gpu.write_text(yaml.safe_dump(single_run._gpu(document, np.array(TRUTH), "made up")))
    simulate(from_mapping(scenario(lengths, rate_rps, str(gpu), requests)), out=tmp_path / "real", saturated_rps=1.0)
    return tmp_path / "real"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = served(tmp_path_factory.mktemp("mixed"), MIXED, 8.0)
    return single_run.calibrate_run(folder, from_mapping(scenario(MIXED, 8.0)))


def test_known_factors_lie_in_their_intervals(found):
    assert found.accepted and found.trained_on == 80
    for truth, (estimate, low, high) in zip(TRUTH, found.factors.values()):
        assert low <= truth <= high
        assert low <= estimate <= high and estimate == pytest.approx(truth, rel=0.15)


def test_the_rest_of_the_run_is_predicted(found):
    assert all(abs(error) < 0.03 for error in found.holdout.values()) and found.holdout.keys() == {"ttft_s", "tpot_s"}


def test_the_result_is_a_gpu_that_a_scenario_can_name(found, tmp_path):
    single_run.write(found, tmp_path / "gpu.yaml")
    gpu, plain = load_gpu(str(tmp_path / "gpu.yaml")), load_gpu("h100-sxm")
    ratio = gpu.kernels.gemm["bf16"].compute_efficiency / plain.kernels.gemm["bf16"].compute_efficiency
    assert ratio == pytest.approx(found.factors["compute efficiency"][0]) and gpu.host.step_s == found.factors["host time per step"][0]
    assert "calibrated on real" in gpu.kernels.source


def test_a_run_that_never_computes_much_is_refused_by_name(tmp_path, capsys):
    folder = served(tmp_path, TINY, 0.5)
    (tmp_path / "scenario.yaml").write_text(json.dumps(scenario(TINY, 0.5)))
    out = tmp_path / "gpu.yaml"
    arguments = ["calibrate", str(folder), "--scenario", str(tmp_path / "scenario.yaml"), "--out", str(out), "--json"]
    assert twinserve.main(arguments) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["accepted"] is False and not out.exists()
    assert "does not identify the compute efficiency" in printed.err


def test_what_cannot_be_calibrated_is_named(tmp_path):
    few = served(tmp_path, TINY, 5.0, requests=20)
    with pytest.raises(InputError, match="has 20 completed requests"):
        single_run.calibrate_run(few, from_mapping(scenario(TINY, 5.0)))
    simulate(from_mapping(scenario(TINY, 5.0)), out=tmp_path / "bare", records=False)
    with pytest.raises(InputError, match="has no table of requests"):
        single_run.calibrate_run(tmp_path / "bare", from_mapping(scenario(TINY, 5.0)))
