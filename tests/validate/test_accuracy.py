"""The accuracy command: real vLLM runs are predicted within the stated errors, and what is missing is named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import twinserve
from serving.errors import InputError
from validate.accuracy import accuracy, exceeding
from validate.measured import vllm_run
from validate.measured.row import Row

RTX4090, RTXPRO6000 = "vllm_0.19_llama-3.1-8b_rtx4090", "vllm_0.19_llama-3.1-8b_rtxpro6000"


def errors(rows):
    return {(row.metric, row.statistic): row.error for row in rows if row.fitted_on == "nothing"}


@pytest.fixture(scope="module")
def pro_6000(data_dir):
    return accuracy(data_dir / "measured" / RTXPRO6000)


def test_the_4090_run_is_predicted_with_nothing_fitted(data_dir):
    found = errors(accuracy(data_dir / "measured" / RTX4090, fit=False))
    assert all(abs(found["ttft_s", statistic]) <= 0.01 for statistic in ("mean", "p50", "p90", "p99"))
    assert abs(found["tpot_s", "mean"]) <= 0.005
    assert all(abs(found["tpot_s", statistic]) <= 0.015 for statistic in ("p50", "p90", "p99"))
    assert all(abs(found["e2e_s", statistic]) <= 0.01 for statistic in ("mean", "p90", "p99")) and abs(found["e2e_s", "p50"]) <= 0.015
    assert abs(found["output_tokens_per_s", "mean"]) <= 0.01


def test_the_pro_6000_run_is_predicted_with_nothing_fitted(pro_6000):
    """Its median TTFT sits on a saturation cliff: 0.3 ms a step moves it by 2.5 points."""
    found = errors(pro_6000)
    assert all(abs(found["ttft_s", statistic]) <= 0.03 for statistic in ("mean", "p90", "p99")) and abs(found["ttft_s", "p50"]) <= 0.06
    assert all(abs(found["tpot_s", statistic]) <= 0.01 for statistic in ("mean", "p50", "p90", "p99"))
    assert all(abs(found["e2e_s", statistic]) <= 0.03 for statistic in ("mean", "p50", "p90", "p99"))


def test_host_time_fitted_on_one_half_predicts_the_other(pro_6000):
    rows = [row for row in pro_6000 if row.fitted_on.startswith("host time")]
    assert all("requests 1-150, judged on the rest" in row.fitted_on for row in rows)
    assert all(abs(row.error) <= 0.03 for row in rows)


def test_the_halved_run_is_shown_with_nothing_fitted_too(pro_6000):
    """So that what the halving does can be told from what the fit does."""
    rows = [row for row in pro_6000 if row.fitted_on == "nothing; judged on requests 151-300 only"]
    assert len(rows) == 12


def test_the_fit_sees_nothing_of_what_it_is_judged_on(data_dir, pro_6000):
    """Spoil the measured second half: the fitted time stays the same."""
    (run,) = vllm_run.find(data_dir / "measured" / RTXPRO6000)
    run.real.last_s[150:] += 100.0
    (words,) = {row.fitted_on for row in pro_6000 if row.fitted_on.startswith("host time")}
    assert words.startswith(f"host time {vllm_run.fit_host_s(run, slice(0, 150)) * 1e3:.2f} ms a step")


def test_host_time_is_never_negative(data_dir):
    """A server that is faster than its profile has no host time to fit, and keeps none."""
    (run,) = vllm_run.find(data_dir / "measured" / RTXPRO6000)
    run.real.last_s[:] -= 1.0
    assert vllm_run.fit_host_s(run, slice(0, 150)) == 0.0


def test_latencies_count_from_the_queue(data_dir):
    """The measured side repeats the figures published with the run."""
    (run,) = vllm_run.find(data_dir / "measured" / RTX4090)
    metrics = run.real.metrics(slice(None))
    assert metrics["ttft_s"].mean() == pytest.approx(65.4566, abs=1e-3)
    assert np.percentile(metrics["e2e_s"], 99) == pytest.approx(153.6275, abs=0.05)
    assert run.scenario["kv_cache"]["blocks"] == 2588 and run.gpu == "rtx-4090"


def test_what_is_missing_is_named(data_dir, tmp_path, capsys):
    with pytest.raises(InputError, match="holds no measured run"):
        accuracy(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        accuracy(tmp_path / "absent")
    shutil.copytree(data_dir / "measured" / RTX4090, tmp_path / RTX4090)
    with pytest.raises(InputError, match=r"no profile of meta-llama/Llama-3.1-8B on NVIDIA GeForce RTX 4090 \(no folder 'profiles'"):
        accuracy(tmp_path)
    assert twinserve.main(["accuracy", str(tmp_path)]) == 2
    (tmp_path / RTX4090 / "meta.json").chmod(0o644)
    (tmp_path / RTX4090 / "meta.json").write_text("{")
    with pytest.raises(InputError, match=r"meta\.json: is no JSON object"):
        accuracy(tmp_path)


def test_the_command_gates_and_prints(data_dir, capsys):
    folder = str(data_dir / "measured" / RTXPRO6000)
    assert twinserve.main(["accuracy", folder, "--no-fit", "--gate", "0.03"]) == 1
    printed = capsys.readouterr().out
    assert "fitted: nothing" in printed and "vllm 0.19.0" in printed and "!" in printed
    assert twinserve.main(["accuracy", folder, "--no-fit", "--gate", "0.06", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0].keys() == {"dataset", "engine", "latency_model", "metric", "statistic", "real", "simulated", "error", "fitted_on"}


def test_a_gate_counts_either_direction():
    rows = [Row("d", "e", "m", "ttft_s", "mean", 1.0, 1.0 + error, error, "nothing") for error in (-0.2, 0.01, 0.2)]
    assert [row.error for row in exceeding(rows, 0.1)] == [-0.2, 0.2]
