"""The prepared GPU script, on a CPU at a small size: every part runs, what is wrong is reported, one part's failure spares the others."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("triton", reason="the engine's extra is not installed")

from engine import gpu_check
from engine.gpu import correctness, speed, steps, timing, twin
from engine.kernels import decode_attention

CPU = torch.device("cpu")


def result_of(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_kernels_and_steps(tmp_path, capsys):
    assert gpu_check.main(["--small", "--device", "cpu", "--seed", "5", "--out", str(tmp_path), "--only", "kernels", "steps"]) == 0
    found = result_of(tmp_path)
    assert found["facts"]["seed"] == 5 and "nothing failed" in capsys.readouterr().out
    kernels = {one["kernel"] for one in found["correctness"]}
    assert {"decode_attention", "prefill_attention", "add_rmsnorm", "silu_mul", "rope", "kv_write", "adapters", "experts", "engine, triton and graphs"} <= kernels
    assert all(one["passed"] for one in found["correctness"])
    assert found["ceilings"]["copy_bytes_per_s"] > 0 and found["decode_sweep"][0]["seconds"] > 0
    assert {(row["path"], row["batch"]) for row in found["decode_steps"]} == {("graph", 1), ("graph", 3), ("eager", 1), ("eager", 3)}
    overlap = found["two_streams"][0]
    assert overlap["beside_s"] > 0 and overlap["lost"] == pytest.approx((overlap["beside_s"] - max(overlap["decodes_s"], overlap["prompt_s"])) / min(overlap["decodes_s"], overlap["prompt_s"]))


def test_profile_serve_calibrate_predict(tmp_path, monkeypatch, capsys):
    runs = {twin.CALIBRATION: (), "held-out": ("workload.arrivals.rate_rps=40.0", "workload.requests=12", "seed=22")}
    monkeypatch.setattr(twin, "SMALL", twin.SMALL._replace(runs=runs, profile_s=1.0))
    monkeypatch.setattr(twin, "FITS", {"profiled-and-served": twin.FITS["profiled-and-served"]})
    assert gpu_check.main(["--small", "--device", "cpu", "--out", str(tmp_path), "--only", "twin"]) == 0
    found = result_of(tmp_path)
    assert found["served"]["profiled_steps"] > 0 and found["served"]["held-out"]["tpot_s"] > 0
    judged = found["judged"]
    assert not any(run["differing_plans"] for run in judged["parity"].values()) and set(judged["parity"]) == set(runs)
    fit = judged["calibration"]["profiled-and-served"]
    assert "refused" in fit or "error" in judged["compared"]["profiled-and-served"]["held-out"]["tpot_s"]["mean"]
    assert "0 of" in capsys.readouterr().out


def test_a_wrong_kernel_is_reported_and_the_script_says_no(tmp_path, monkeypatch, capsys):
    right = decode_attention.decode_attention

    def wrong(*args, **options):
        out = right(*args, **options)
        out[0, 0, 0] = float("nan")
        return out

    monkeypatch.setattr(decode_attention, "decode_attention", wrong)
    for part in ("check_prefill", "check_engine"):
        monkeypatch.setattr(correctness, part, lambda *_: correctness.Check("other", "", 0.0, 0.0))
    monkeypatch.setattr(correctness, "check_pointwise", lambda *_: ())
    for part in ("ceilings", "sweep"):
        monkeypatch.setattr(speed, part, lambda *_, **__: (_ for _ in ()).throw(RuntimeError("the device is gone")))
    assert gpu_check.main(["--small", "--device", "cpu", "--out", str(tmp_path), "--only", "kernels"]) == 1
    out = capsys.readouterr().out
    assert "WRONG decode_attention" in out and "ceilings: RuntimeError: the device is gone" in out and "failed: correctness, ceilings" in out
    assert result_of(tmp_path)["ceilings"] == {"failed": "RuntimeError: the device is gone"}


def test_no_part_begins_once_the_time_is_up(tmp_path):
    report = gpu_check.Report(tmp_path, {}, deadline_s=-1.0)
    assert report.part("late", lambda: 1) is None and report.failed == ["late"]


def test_without_a_gpu_it_says_how_to_test_it(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "--small --device cpu" in capsys.readouterr().err


def test_errors_are_measured_against_the_reference_and_what_is_not_finite_never_passes():
    reference = torch.ones(10)
    assert timing.relative_error(reference * 1.01, reference) == pytest.approx(0.01, rel=1e-4)
    assert timing.relative_error(torch.full((10,), float("nan")), reference) == float("inf")


def test_candidates_begin_with_the_engines_own_and_claim_no_more_than_fits():
    own = decode_attention.DecodeTuning()
    found = speed.candidates(128, 2)
    assert found[0] == own and len(found) == len(decode_attention.CANDIDATES) + 4
    for one in found:
        shared = 2 * one.block_n * 128 * 2 * max(1, one.stages - 1)
        assert one.resident * shared <= speed.MULTIPROCESSOR_BYTES or one.resident == 1
        assert one.resident * one.warps <= speed.MULTIPROCESSOR_WARPS


def test_the_floor_of_a_decode_step_by_hand():
    """Llama-3.1-8B at batch 64 x 8192: 15.0 GB of weights without the embedding, 128 KiB of KV a token."""
    from engine.architecture import from_llm
    from serving.catalog import load_llm

    shape = from_llm(load_llm("llama-3.1-8b"))
    weights = (8_030_261_248 - 128_256 * 4096) * 2
    assert steps.floor_s(shape, 64, 8192, 2, 1e12) == pytest.approx((weights + 64 * 8192 * 131_072) / 1e12)


def test_sequences_of_a_measured_step_share_no_block():
    step = steps.decode_step(3, 32)
    blocks = [block for one in step.sequences for block in one.block_table]
    assert len(blocks) == len(set(blocks)) == 9 and 0 not in blocks
