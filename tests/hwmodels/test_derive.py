"""Kernel sets are what the fit finds: in synthetic tables, and in the profile that the RTX 4090 set came from."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest
import yaml

from hwmodels.derive import derive_from_profile, fit_all_reduce, fit_decode, fit_experts, fit_gemm, fit_prefill, main
from serving.catalog import CATALOG, read_entry

PEAK, BANDWIDTH = 100e12, 1e12


def test_a_gemm_table_gives_back_its_constants_and_ignores_cached_rows():
    rows = pd.DataFrame(itertools.product([1, 64, 512, 4096], [1024, 8192], [2048, 16384]), columns=["m", "n", "k"])
    compute = 2 * rows.m * rows.n * rows.k / (PEAK * 0.6)
    memory = 2 * (rows.m * rows.k + rows.n * rows.k + rows.m * rows.n) / (BANDWIDTH * 0.7)
    rows["latency"] = (4e-6 + pd.concat([compute, memory], axis=1).max(axis=1)) * 1e3
    cached = rows.assign(latency=rows.latency * 0.01)
    fit = fit_gemm(pd.concat([rows, cached]), 2, PEAK, BANDWIDTH)
    assert fit["latency_s"] == pytest.approx(4e-6, rel=1e-3)
    assert (fit["compute_efficiency"], fit["memory_efficiency"]) == (pytest.approx(0.6, rel=1e-3), pytest.approx(0.7, rel=1e-3))


def test_attention_tables_give_back_their_constants():
    heads = {"num_heads": 32, "num_key_value_heads": 8}
    prefill = pd.DataFrame(itertools.product([1, 4], [64, 512, 4096]), columns=["batch_size", "new"]).assign(**heads)
    flops = 4 * prefill.batch_size * 32 * 128 * prefill.new * (prefill.new + 1) / 2
    moved = prefill.batch_size * prefill.new * (2 * 8 + 2 * 32) * 128 * 2
    prefill["latency"] = (9e-6 + flops / (PEAK * 0.6) + moved / (BANDWIDTH * 0.5)) * 1e3
    fit = fit_prefill(prefill, PEAK, BANDWIDTH)
    assert (fit["compute_efficiency"], fit["memory_efficiency"]) == (pytest.approx(0.6, rel=1e-3), pytest.approx(0.5, rel=1e-3))
    decode = pd.DataFrame(itertools.product([1, 8, 64], [127, 2047, 16383]), columns=["batch_size", "step"]).assign(**heads)
    moved = (decode.batch_size * (decode.step + 1) * 2 * 8 + decode.batch_size * 2 * 32) * 128 * 2
    decode["latency"] = (9e-6 + moved / (BANDWIDTH * 0.8) * (1 + 2 / (decode.batch_size * 8))) * 1e3
    fit = fit_decode(decode, PEAK, BANDWIDTH)
    assert (fit["memory_efficiency"], fit["half_saturation_units"]) == (pytest.approx(0.8, rel=1e-3), pytest.approx(2, rel=1e-2))


def test_a_table_of_experts_gives_back_its_constants():
    rows = pd.DataFrame(itertools.product([1, 8, 64, 512, 4096], [1, 4]), columns=["num_tokens", "moe_tp_size"])
    rows = rows.assign(hidden_size=2048, inter_size=768, topk=8, num_experts=128)
    inner, routed = 768 / rows.moe_tp_size, rows.num_tokens * 8
    weights = 3 * 2048 * inner
    moved = routed.clip(upper=128) * weights * 0.53125 + routed * (2 * 2048 + 3 * inner) * 2
    rows["latency"] = (30e-6 + 2 * routed * weights / (PEAK * 0.6) + moved / (BANDWIDTH * 0.7)) * 1e3
    fit = fit_experts(rows, 0.53125, PEAK, BANDWIDTH)
    assert fit["latency_s"] == pytest.approx(30e-6, rel=1e-3)
    assert (fit["compute_efficiency"], fit["memory_efficiency"]) == (pytest.approx(0.6, rel=1e-3), pytest.approx(0.7, rel=1e-3))


def test_an_all_reduce_table_gives_back_its_constants():
    rows = pd.DataFrame(itertools.product([2, 4], [2**n for n in range(7, 25)]), columns=["num_gpus", "message_size"]).assign(backend="vllm_graph")
    rows["latency"] = (5e-6 + 2 * (rows.num_gpus - 1) / rows.num_gpus * rows.message_size * 2 / (450e9 * 0.5)) * 1e3
    fits = fit_all_reduce(rows, 450e9)
    assert {gpus: fit["efficiency"] for gpus, fit in fits.items()} == {2: pytest.approx(0.5, rel=1e-3), 4: pytest.approx(0.5, rel=1e-3)}


def test_the_rtx_4090_set_is_what_its_profile_gives(data_dir):
    profile = data_dir / "profiles" / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1"
    fitted = derive_from_profile(profile, read_entry("gpus", "rtx-4090", "test")[0])
    stored = yaml.safe_load((CATALOG / "kernels" / "rtx-4090.yaml").read_text())
    for family in ("prefill_attention", "decode_attention"):
        assert fitted[family] == pytest.approx(stored[family], rel=0.02, abs=1e-6)
    assert fitted["gemm"]["bf16"] == pytest.approx(stored["gemm"]["bf16"], rel=0.02)


def test_the_command_names_what_is_missing(capsys):
    assert main(["only-one"]) == 2
    assert main(["h100_sxm", "no-such-gpu"]) == 2
    assert "no GPU named 'no-such-gpu'" in capsys.readouterr().err
