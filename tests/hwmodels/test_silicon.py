"""The provider over aiconfigurator-core: its tables give its own answers, and without it the message names the extra."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import pytest

from hwmodels import silicon
from serving import catalog
from serving.errors import InputError
from serving.plan import StepShape

needs_package = pytest.mark.skipif(
    not any(d.metadata["Name"] == silicon.PACKAGE for d in metadata.distributions()), reason="aiconfigurator-core, the extra [silicon], is not installed"
)


def build(llm="llama-3.1-8b", gpu="h100-sxm", tensor_parallel=1, weight_dtype=None, **options):
    return silicon.build(options, llm=catalog.load_llm(llm), gpu=catalog.load_gpu(gpu), tensor_parallel=tensor_parallel, weight_dtype=weight_dtype)


def test_without_the_package_the_message_names_the_extra(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(InputError, match=r"latency.name: 'silicon' needs .*not installed \(pip install 'twinserve\[silicon\]'\)"):
        build()
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.1")
    with pytest.raises(InputError, match=r"0\.12\.x and finds 0\.13\.1"):
        build()


@needs_package
@pytest.mark.parametrize(("llm", "gpu", "tensor_parallel", "weight_dtype"), [("llama-3.1-70b", "h200-sxm", 4, "fp8"), ("qwen3-8b", "a100-sxm-80gb", 1, None)])
def test_the_tables_give_the_package_s_own_answers(llm, gpu, tensor_parallel, weight_dtype):
    """At 150 shapes off the grid: half a per cent at the median, 3 % at the 95th percentile."""
    from aiconfigurator_core.sdk import EngineHandle

    model = build(llm, gpu, tensor_parallel, weight_dtype)
    origin = model.provenance()
    request = {key: origin[key] for key in ("backend_version", "tp_size", "gemm_quant_mode", "kvcache_quant_mode")}
    engine = EngineHandle.compile(origin["model"], origin["system"], origin["engine"], **request)
    kernels, draw = model._kernels, np.random.default_rng(1)
    errors = {"decode": [], "prefill": []}
    for _ in range(150):
        decodes, kv = (int(x) for x in np.exp(draw.uniform(np.log([1, 50]), np.log([400, 8000]))))
        chunk, before = int(np.exp(draw.uniform(np.log(20), np.log(8000)))), int(draw.integers(0, 6000))
        knots, times_s = kernels.decode_attention(decodes)
        decode_s = kernels.fixed_s(decodes, decodes, True) + np.interp(kv, knots, times_s)
        prefill_s = kernels.fixed_s(chunk, 1, False) + kernels.mixed_attention_s(chunk, before, 0, 0.0)
        errors["decode"].append(abs(decode_s * 1e3 / engine.decode_step_latency(decodes, kv, 1) - 1))
        errors["prefill"].append(abs(prefill_s * 1e3 / engine.predict_prefill_latency(1, chunk + before, before) - 1))
    for values in errors.values():
        assert np.median(values) < 0.005
        assert np.quantile(values, 0.95) < 0.03


@needs_package
def test_runs_are_steps_and_experts_are_priced():
    model = build("qwen3-30b-a3b", tensor_parallel=2, expert_parallel=2)
    shape = StepShape((), 9, 9 * 400, 9)
    assert model.run_s(shape, 100) == [model.step_s(StepShape((), 9, 9 * (400 + i), 9)) for i in range(100)]
    assert model.step_s(StepShape(((512, 0),), 9, 9 * 400, 10)) > model.step_s(shape)
    assert model.provenance()["moe_ep_size"] == 2


@needs_package
def test_provenance_names_the_literal_engine_version():
    origin = build(engine="trtllm").provenance()
    assert origin["package"].startswith("aiconfigurator-core 0.12.")
    assert origin["engine"] == "trtllm" and origin["backend_version"][0].isdigit()


@needs_package
@pytest.mark.parametrize(("options", "message"), [
    ({"llm": "llama-3.3-70b"}, "latency.model: .*no model for 'llama-3.3-70b' .*did you mean 'meta-llama/Meta-Llama-3.1-70B'"),
    ({"gpu": "mi300x"}, "latency.system: .*no system for the GPU 'mi300x'"),
    ({"engine": "vlm"}, "cannot price .* with vlm"),
    ({"version": "0.1"}, "cannot price .*current.*0.24.0"),
    ({"weight_dtype": "mxfp4"}, "latency.gemm_quant: .*mxfp4"),
    ({"enginee": "vllm"}, "latency.enginee: unknown option .*did you mean 'engine'"),
    ({"engine": 3}, "latency.engine: must be text"),
    ({"llm": "qwen3-30b-a3b", "expert_parallel": 3}, "latency.expert_parallel: 3 does not divide"),
    ({"llm": "deepseek-v3", "gpu": "h200-sxm", "tensor_parallel": 8}, "does not price attention as an operator of its own"),
])  # fmt: skip
def test_what_it_cannot_answer_is_one_line(options, message):
    with pytest.raises(InputError, match=message):
        build(**options)


@needs_package
def test_a_prompt_s_attention_has_a_quantisation_of_its_own():
    options = {"engine": "sglang", "gemm_quant": "fp8_block", "kv_quant": "fp8"}
    with pytest.raises(InputError, match="context attention data missing"):  # bf16 attention over fp8 entries is not measured for it
        build(gpu="h200-sxm", **options)
    model = build(gpu="h200-sxm", attention_quant="fp8", **options)
    assert model.provenance()["fmha_quant_mode"] == "fp8"
    long = StepShape(((8192, 0),), 0, 0, 1)
    assert model.step_s(long) < build(gpu="h200-sxm", engine="sglang", gemm_quant="fp8_block").step_s(long)
    with pytest.raises(InputError, match=r"latency.attention_quant: must be text"):
        build(attention_quant=8)
