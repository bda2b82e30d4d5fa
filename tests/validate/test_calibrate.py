"""Calibration: known coefficients come back, the error on held-out steps is honest, and what says too little is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

import twinserve
from hwmodels.fitted import DEVICE_TERMS, HOST_TERMS, Coefficients, Fitted, load
from serving.metrics import COMPLETED, FleetTotals, Metrics
from serving.plan import StepShape
from serving.records import RunWriter
from validate.calibrate import calibrate, fit_terms, write

TRUTH = Coefficients(
    dict.fromkeys(DEVICE_TERMS, 0.0)
    | {"constant": 2e-3, "tokens": 1e-4, "any_decode": 5e-4, "decodes": 1.5e-4, "decode_context_tokens": 1e-6, "query_key_pairs": 2e-7, "prefill_seqs": 3e-4},
    dict.fromkeys(HOST_TERMS, 0.0) | {"constant": 4e-4, "sequences": 2e-5},
)


def shapes(rng, steps):
    """A mixture like a serving run's: mostly decodes, some with a chunk, some prompts alone."""
    for _ in range(steps):
        kind = rng.random()
        decodes = int(rng.integers(1, 30)) if kind > 0.1 else 0
        chunks = ((int(rng.integers(2, 200)), int(rng.choice([0, 0, 64]))),) if kind < 0.3 else ()
        yield StepShape(chunks, decodes, decodes * int(rng.integers(10, 400)), decodes + len(chunks))


def write_run(out, *, steps=1500, noise=0.05, seed=0, device="test device", cached=0, truth=TRUTH, engine=True, **scenario):
    """A run directory whose steps take what ``truth`` says, times log-normal noise."""
    rng, model = np.random.default_rng(seed), Fitted(truth)
    host = Fitted(Coefficients(dict.fromkeys(DEVICE_TERMS, 0.0), truth.host))
    metrics = Metrics(("default",), lambda _: (np.inf,) * 3, keep_rows=True)
    metrics.finish((0, 0, 0.0, 100, cached, 2, 0.0, 0.1, 0.2, 0, 0, COMPLETED))
    now_s = 0.0
    with RunWriter(out, engine_steps=engine) as writer:
        for step, shape in enumerate(shapes(rng, steps)):
            factor = float(np.exp(rng.normal(0, noise)))
            seconds, host_s = model.step_s(shape) * factor, host.step_s(shape) * factor
            prefill = sum(new for new, _ in shape.chunks)
            writer.steps.append((step, 0, now_s, seconds, prefill, len(shape.chunks), shape.decodes, shape.decode_context_tokens, 1, 0, 0, 1))
            if engine:
                pairs = sum(new * before + new * (new + 1) // 2 for new, before in shape.chunks)
                before = sum(before for _, before in shape.chunks)
                device_s = seconds - host_s
                writer.engine_steps.append(
                    (step, "eager", 0, pairs, before, shape.logits_rows, host_s, 0.0, 0.0, 0.0, 0.0, device_s, seconds, 0.0, [])
                )
            now_s += seconds
        totals = FleetTotals(now_s, 1, 1, None, now_s, steps, steps, 1, 0.0, 0.0, 0, 0, 0)
        plain = {"version": 1, "name": "made", "llm": "smollm2-135m", "cluster": {"gpu": "l4", "tensor_parallel": 1}, **scenario}
        writer.publish(
            scenario=plain, seed=seed, device=device, summary=metrics.summary(scenario="made", seed=seed, totals=totals),
            requests=metrics.columns(), class_names=metrics.class_names, versions={"dtype": "fp32"}, measured_on="2026-01-02",
        )  # fmt: skip
    return out


def test_known_coefficients_come_back(tmp_path):
    result = calibrate([write_run(tmp_path / "run", noise=0.0)])
    assert result.accepted and result.mape.estimate < 1e-6 and abs(result.bias) < 1e-6
    for part, truth in (("device_s", TRUTH.device), ("host_s", TRUTH.host)):
        found = {name: result.fit[part].get(name, 0.0) for name in truth}
        assert found == pytest.approx(truth, rel=1e-3, abs=1e-8), part


def test_a_batch_size_that_leaves_the_line_is_found(tmp_path):
    """Two sequences may take a kernel that is slower than the one of three: no line in the batch size says that."""
    odd = Coefficients(TRUTH.device, TRUTH.host, (), {1: 0.0, 2: 2e-3, 3: 0.0})
    result = calibrate([write_run(tmp_path / "run", noise=0.02, truth=odd, steps=3000)])
    assert result.accepted and result.mape.estimate < 0.02
    write(result.fit, tmp_path / "fit.yaml")
    found, truth = Fitted(load(tmp_path / "fit.yaml")[0]), Fitted(odd)
    for decodes in (1, 2, 3, 4, 20):
        shape = StepShape(decodes=decodes, decode_context_tokens=200 * decodes, logits_rows=decodes)
        assert found.step_s(shape) == pytest.approx(truth.step_s(shape), rel=0.02), decodes


def test_the_error_on_held_out_steps_is_the_noise_by_regime(tmp_path):
    result = calibrate([write_run(tmp_path / "a", noise=0.08), write_run(tmp_path / "b", noise=0.08, seed=1)])
    expected = 0.08 * np.sqrt(2 / np.pi)
    assert (result.accepted and result.mape.holds(expected)) or abs(result.mape.estimate - expected) < 0.01
    assert set(result.by_regime) == {"prefill", "decode", "mixed"}
    assert all(abs(found.estimate - expected) < 0.03 and steps > 50 for found, steps in result.by_regime.values())
    assert result.train_steps == pytest.approx(0.7 * 2 * 1492, rel=0.05) and abs(result.bias) < 0.02


def test_the_total_time_agrees_even_where_large_errors_lie_on_one_side():
    rng = np.random.default_rng(2)
    terms = np.column_stack([np.ones(4000), rng.uniform(1, 50, 4000)])
    base = terms @ [1e-3, 1e-4]
    seconds = base * np.where(rng.random(4000) < 0.1, 3.0, 1.0)
    coefficients = fit_terms(terms, seconds, seconds)
    assert (terms @ coefficients).sum() == pytest.approx(seconds.sum(), rel=1e-9) and (coefficients >= 0).all()


def test_no_coefficient_is_negative_where_plain_least_squares_has_one():
    rng = np.random.default_rng(3)
    terms = np.column_stack([np.ones(500), rng.uniform(1, 50, 500), rng.uniform(1, 50, 500)])
    seconds = np.maximum(terms @ [1e-2, 1e-4, -1e-4], 1e-5)
    assert (np.linalg.lstsq(terms, seconds, rcond=None)[0] < 0).any()
    assert (fit_terms(terms, seconds, seconds) >= 0).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([{"noise": 0.6}], "too noisy: steps held out are"),
        ([{"steps": 150}], "too short: 142 steps"),
        ([{"cached": 32}], "warm, 1 of 1 requests found part of their prompt in the prefix cache"),
        ([{"device": "simulated l4"}], "computed by the simulator, not measured"),
        ([{}, {"device": "another device"}], "from another device: test device and another device"),
        ([{}, {"llm": "qwen3-8b"}], "from another llm"),
    ],
)
def test_what_says_too_little_is_refused_with_the_reason_and_exit_2(tmp_path, capsys, options, reason):
    folders = [str(write_run(tmp_path / str(number), **each)) for number, each in enumerate(options)]
    code = twinserve.main(["calibrate", *folders, "--out", str(tmp_path / "fit.yaml"), "--json"])
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert code == 2 and not said["accepted"] and reason in said["reason"] and reason in captured.err
    assert not (tmp_path / "fit.yaml").exists()


def test_a_fit_says_where_it_comes_from_and_prices_steps(tmp_path, capsys):
    code = twinserve.main(["calibrate", str(write_run(tmp_path / "run")), "--out", str(tmp_path / "fit.yaml")])
    out = capsys.readouterr().out
    assert code == 0 and "decode" in out and "wrote" in out
    data = yaml.safe_load((tmp_path / "fit.yaml").read_text())
    origin = data["provenance"]
    assert origin["device"] == "test device" and origin["measured_on"] == ["2026-01-02"] and "commit" in origin and origin["versions"]["dtype"] == "fp32"
    assert data["llm"] == "smollm2-135m" and data["gpu"] == "l4" and 0 < data["holdout"]["mape"] < 0.1
    coefficients, _ = load(tmp_path / "fit.yaml")
    shape = StepShape(((100, 0),), 10, 2000, 11)
    assert Fitted(coefficients).step_s(shape) == pytest.approx(Fitted(TRUTH).step_s(shape), rel=0.05)


def test_equal_runs_give_equal_files(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("a", "b"):
        write(calibrate([run]).fit, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_log_of_steps_alone_can_be_fitted(tmp_path):
    result = calibrate([write_run(tmp_path / "run", engine=False)])
    assert result.accepted and result.fit["host_s"] == {} and result.mape.estimate < 0.1
