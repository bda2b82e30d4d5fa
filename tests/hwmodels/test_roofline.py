"""The roofline model: hand arithmetic, an independent datasheet bound, exact runs, graphs, and directions seen in the field."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.latency import build
from hwmodels.operators import experts_touched
from serving.catalog import KernelFit, KernelTimes, load_gpu, load_llm, names
from serving.errors import InputError
from serving.llm import KV_BYTES, WEIGHT_BYTES
from serving.plan import StepShape

SHAPED = ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "gemma-3-27b", "smollm2-135m"]
NO_HOST = {"host_step_s": 0.0, "host_sequence_s": 0.0, "launch_s": 0.0, "graph_launch_s": 0.0}
IDEAL = KernelFit(latency_s=0.0, memory_efficiency=1.0)


def model(llm="llama-3.1-8b", gpu="h100-sxm", tensor_parallel=1, options=None, **dtypes):
    return build("roofline", options or {}, llm=load_llm(llm), gpu=load_gpu(gpu), tensor_parallel=tensor_parallel, **dtypes)


def decode(batch, context):
    return StepShape((), batch, batch * context, batch)


chunks = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 40_000)), max_size=3).map(tuple)


@st.composite
def shapes(draw):
    some = draw(chunks)
    decodes = draw(st.integers(0 if some else 1, 600))
    return StepShape(some, decodes, decodes * draw(st.integers(1, 20_000)), decodes + draw(st.integers(0, len(some))))


# -- the datasheet ------------------------------------------------------------------------------------------------


def datasheet_bound_s(llm, gpu, tp, weight_dtype, kv_dtype, shape):
    """Least seconds any program needs: bytes that must move over the bandwidth, operations that must be done over the peak."""
    count = llm.parameters()
    tokens = shape.decodes + sum(new for new, _ in shape.chunks)
    rows = shape.logits_rows if shape.chunks else shape.decodes
    linear, experts = llm.dtype_of_weights(weight_dtype), llm.dtype_of_experts(weight_dtype)
    share = llm.moe.experts_per_token / llm.moe.experts if llm.moe else 0.0
    always = count.attention + count.mlp + count.shared_experts
    if llm.mla:  # the up-projection of keys and values may be folded away in decode
        always -= llm.layers * llm.mla.kv_lora_rank * llm.heads * (llm.mla.nope_dim + llm.mla.v_dim)
    if llm.qkv_bias:
        always -= llm.layers * (llm.heads + 2 * llm.kv_heads) * llm.head_dim
    full = (llm.layers - (llm.sliding_window.layers if llm.sliding_window else 0)) / llm.layers
    moved = (always * WEIGHT_BYTES[linear] + count.experts * share * WEIGHT_BYTES[experts]) / tp
    moved += llm.vocab * llm.hidden * 2 / tp * (rows > 0)
    moved += full * shape.decode_context_tokens * llm.kv_bytes_per_token("bf16", tp) * KV_BYTES[kv_dtype] / 2
    pairs = sum(new * before + new * (new + 1) / 2 for new, before in shape.chunks) + shape.decode_context_tokens
    dims = llm.head_dim if llm.mla is None else llm.mla.v_dim
    seconds = 2 * always * tokens / tp / gpu.peak_flops(linear) + 2 * count.experts * share * tokens / tp / gpu.peak_flops(experts)
    seconds += (2 * rows * llm.vocab * llm.hidden + 4 * full * llm.layers * llm.heads * dims * pairs) / tp / gpu.peak_flops("bf16")
    return max(seconds, moved / gpu.memory_bytes_per_s)


@given(shape=shapes(), llm=st.sampled_from(SHAPED), gpu=st.sampled_from(names("gpus")), tp=st.sampled_from([1, 2, 4, 8]),
       weight_dtype=st.sampled_from([None, "bf16", "fp8", "int4"]), kv_dtype=st.sampled_from(["bf16", "fp8"]))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_step_is_faster_than_the_datasheet(shape, llm, gpu, tp, weight_dtype, kv_dtype):
    facts, device = load_llm(llm), load_gpu(gpu)
    if facts.tensor_parallel_problem(tp):
        tp = 1
    priced = build("roofline", NO_HOST, llm=facts, gpu=device, tensor_parallel=tp, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    assert priced.step_s(shape) >= datasheet_bound_s(facts, device, tp, weight_dtype, kv_dtype, shape)


@pytest.mark.parametrize("gpu", names("gpus"))
@pytest.mark.parametrize("llm", SHAPED)
def test_ideal_kernels_still_obey_the_datasheet(llm, gpu):
    """The margin is in the formulas, not in the efficiencies."""
    device = load_gpu(gpu)
    kernels = KernelTimes(name="ideal", source="hand", gemm={"bf16": IDEAL}, prefill_attention=IDEAL, decode_attention=IDEAL, elementwise=IDEAL)
    ideal = dataclasses.replace(device, kernels=kernels)
    priced = build("roofline", NO_HOST, llm=load_llm(llm), gpu=ideal)
    for shape in (decode(1, 1), decode(64, 900), StepShape(((2048, 0),), 0, 0, 1), StepShape(((512, 3000),), 40, 9000, 41)):
        assert priced.step_s(shape) >= datasheet_bound_s(load_llm(llm), ideal, 1, None, "bf16", shape)


# -- by hand ------------------------------------------------------------------------------------------------------


def test_batch_one_decode_by_hand():
    """Llama-3.1-8B, context 1000, a device of 1 TB/s and perfect kernels: every operator streams its bytes."""
    kernels = KernelTimes(name="ideal", source="hand", gemm={"bf16": IDEAL}, prefill_attention=IDEAL, decode_attention=IDEAL, elementwise=IDEAL)
    device = dataclasses.replace(load_gpu("h100-sxm"), memory_bytes_per_s=1e12, kernels=kernels)
    priced = build("roofline", NO_HOST, llm=load_llm("llama-3.1-8b"), gpu=device)
    per_layer = 2 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)  # qkv, o, gate and up, down
    per_layer += 2 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)  # their inputs and outputs
    per_layer += 2 * (32 + 8) * 128 * 2 + 2 * 4 * 4096 * 2 + (28672 + 14336) * 2  # rotary and cache write, two norms, activation
    per_layer += 1000 * 2 * 8 * 128 * 2 + 2 * 32 * 128 * 2  # KV read, query and output
    once = 2 * 4096 * 2 + 4 * 4096 * 2 + 2 * (4096 * 128256 + 4096 + 128256) + 128256 * 10  # embedding, norm, LM head, sampler
    assert priced.step_s(decode(1, 1000)) == pytest.approx((32 * per_layer + once) / 1e12, rel=1e-12)


def test_measured_experts_by_hand():
    """gpt-oss-20b, one token: 4 of 32 experts of a layer are read by one operator; its flops come on top, as the fit has them."""
    fit = KernelFit(latency_s=30e-6, memory_efficiency=0.5, compute_efficiency=0.25)
    plain = load_gpu("h100-sxm")
    device = dataclasses.replace(plain, kernels=dataclasses.replace(plain.kernels, experts={"mxfp4": fit}))
    operators = build("roofline", NO_HOST, llm=load_llm("gpt-oss-20b"), gpu=device).describe(decode(1, 1))["operators"]
    weights = 3 * 2880 * 2880
    moved = 4 * weights * (0.5 + 1 / 32) + 4 * (2880 + 5760 + 2880 + 2880) * 2
    layer_s = 30e-6 + moved / (plain.memory_bytes_per_s * 0.5) + 2 * 4 * weights / (plain.peak_flops("bf16") * 0.25)
    assert operators["experts"]["seconds"] == pytest.approx(24 * layer_s, rel=1e-12)
    assert not {"experts_up", "experts_down", "expert_activation"} & set(operators)


def test_experts_that_nobody_measured_cost_as_linear_layers():
    operators = model("qwen3-30b-a3b", "a100-sxm-80gb").describe(decode(8, 100))["operators"]
    assert {"experts_up", "experts_down", "expert_activation"} <= set(operators) and "experts" not in operators


def test_prefill_by_hand():
    """A compute-bound chunk: two flops a weight and token, four a query-key pair and head dimension, LM head for one row."""
    fit = KernelFit(latency_s=0.0, memory_efficiency=1.0, compute_efficiency=0.5)
    kernels = KernelTimes(name="half", source="hand", gemm={"bf16": fit}, prefill_attention=fit, decode_attention=fit, elementwise=fit)
    device = dataclasses.replace(load_gpu("h100-sxm"), memory_bytes_per_s=1e18, kernels=kernels)
    priced = build("roofline", NO_HOST, llm=load_llm("llama-3.1-8b"), gpu=device)
    linear = 2 * 2048 * 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    attention = 4 * 32 * 32 * 128 * (2048 * 1000 + 2048 * 2049 / 2)
    expected = (linear + attention + 2 * 4096 * 128256) / (0.5 * 989e12)
    assert priced.step_s(StepShape(((2048, 1000),), 0, 0, 1)) == pytest.approx(expected, rel=1e-4)


def test_chunks_with_context_cost_what_one_prompt_costs_in_attention():
    whole = model(options=NO_HOST).describe(StepShape(((4096, 0),), 0, 0, 1))["operators"]["prefill_attention"]["seconds"]
    halves = [model(options=NO_HOST).describe(StepShape((chunk,), 0, 0, 1))["operators"]["prefill_attention"]["seconds"]
              for chunk in ((2048, 0), (2048, 2048))]  # fmt: skip
    assert halves[0] < halves[1]
    assert sum(halves) == pytest.approx(whole, rel=0.2)
    assert sum(halves) > whole  # the KV of the first half is read again, and each half is launched


def test_expected_number_of_experts_touched():
    assert experts_touched(1, 128, 8) == pytest.approx(8)
    assert experts_touched(10_000, 128, 8) == pytest.approx(128)
    assert experts_touched(16, 8, 2) == pytest.approx(8 * (1 - 0.75**16))


# -- exactness and speed of the fast path -------------------------------------------------------------------------


@pytest.mark.parametrize("llm", ["llama-3.1-8b", "gemma-3-27b"])
@given(batch=st.integers(1, 700), context=st.integers(1, 60_000), steps=st.integers(0, 80), queries=st.integers(1, 4), sizes=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_run_is_bit_for_bit_its_steps(llm, batch, context, steps, queries, sizes):
    priced = model(llm, options={} if sizes else {"capture_largest": 0})
    shape = StepShape((), batch, batch * context, batch, queries)
    stepwise = [model(llm, options={} if sizes else {"capture_largest": 0}).step_s(
        shape._replace(decode_context_tokens=batch * context + i * batch)) for i in (0, steps - 1)] if steps else []  # fmt: skip
    run = priced.run_s(shape, steps)
    assert len(run) == steps
    assert [run[0], run[-1]] == stepwise if steps else True
    assert run == [priced.step_s(shape._replace(decode_context_tokens=batch * context + i * batch)) for i in range(steps)]


@given(shape=shapes(), llm=st.sampled_from(SHAPED), tp=st.sampled_from([1, 2]), largest=st.sampled_from([0, 512]))
@settings(max_examples=100, deadline=None)
def test_a_description_adds_up_to_the_step(shape, llm, tp, largest):
    priced = model(llm, tensor_parallel=1 if load_llm(llm).tensor_parallel_problem(tp) else tp, options={"capture_largest": largest})
    described = priced.describe(shape)
    assert described["seconds"] == priced.step_s(shape)
    operators = sum(operator["seconds"] for operator in described["operators"].values())
    assert operators + described["sides"]["host"] == pytest.approx(described["seconds"], rel=1e-9)
    assert sum(described["sides"].values()) == pytest.approx(described["seconds"], rel=1e-9)
    assert described["bottleneck"] in described["sides"]


@given(shape=shapes(), more=st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less_time(shape, more):
    priced = model()
    seconds = priced.step_s(shape)
    assert priced.step_s(shape._replace(decode_context_tokens=shape.decode_context_tokens + more)) >= seconds
    if shape.chunks:
        (new, before), *rest = shape.chunks
        assert priced.step_s(shape._replace(chunks=((new, before + more), *rest))) > seconds
        assert priced.step_s(shape._replace(logits_rows=shape.logits_rows + more)) > seconds


def test_an_empty_step_costs_the_host_its_time():
    assert model().step_s(StepShape()) == load_gpu("h100-sxm").host.step_s
    assert model().run_s(StepShape(), 2) == [0.001, 0.001]


# -- directions seen in the field ---------------------------------------------------------------------------------


def test_t1_batches_beyond_the_captured_sizes_are_slower_and_capturing_mends_it():
    by_eights = model("qwen3-1.7b", options={"capture_sizes": list(range(8, 97, 8))})
    mended = model("qwen3-1.7b", options={"capture_sizes": [*range(8, 97, 8), 100]})
    inside = by_eights.step_s(decode(96, 500))
    for batch in range(97, 101):
        assert by_eights.path(decode(batch, 500)) == (batch, "eager")
        assert by_eights.step_s(decode(batch, 500)) > 1.05 * inside
        assert mended.step_s(decode(batch, 500)) < 1.03 * inside


def test_t2_eager_is_far_slower_than_padded_and_padded_slower_than_exact():
    def at(sizes):
        return model("qwen3-1.7b", options={"capture_sizes": sizes}).step_s(decode(12, 300))

    eager, exact, padded = at([1, 2, 4, 8]), at([1, 2, 4, 8, 12]), at([1, 2, 4, 8, 16])
    assert eager > 1.5 * padded
    assert padded > exact


def test_t3_a_floor_that_tensor_parallelism_does_not_shrink():
    steps = [model("qwq-32b", "a100-sxm-80gb", tp).step_s(decode(1, 1000)) for tp in (2, 4, 8)]
    assert steps[0] > steps[1] > steps[2]
    assert steps[2] > 1.3 * steps[0] / 4  # bandwidth alone would give a quarter
    floor = model("qwq-32b", "a100-sxm-80gb", 8).describe(decode(1, 1000))["sides"]
    assert floor["launch"] + floor["link"] + floor["host"] > 0.4 * steps[2]


def test_t3_with_the_host_gap_of_the_engine_that_was_measured_every_degree_is_within_15_percent():
    """vLLM 0.7.2, whose V0 engine leaves the GPUs idle for about 4 ms at each decode step (vLLM issue 6854); 1 token in, 200 out."""
    for tp, measured_s in ((2, 27.5e-3), (4, 19.6e-3), (8, 15.8e-3)):
        for all_reduce in ("kernels", "library"):
            options = {"host_step_s": 0.004, "all_reduce": all_reduce}
            assert model("qwq-32b", "a100-sxm-80gb", tp, options=options).step_s(decode(1, 100)) == pytest.approx(measured_s, rel=0.15)


def test_m6_an_fp8_cache_hardly_speeds_up_a_small_batch():
    plain, narrow = (model("qwen3-8b", "a100-sxm-80gb", kv_dtype=dtype).step_s(decode(4, 1500)) for dtype in ("bf16", "fp8"))
    assert 0.95 * plain < narrow < plain


def test_narrow_weights_speed_up_decode_and_not_prefill_where_the_tensor_cores_lack_them():
    def a100(dtype, shape):
        return model(gpu="a100-sxm-80gb", weight_dtype=dtype).step_s(shape)

    assert a100("int4", decode(1, 500)) < 0.6 * a100("bf16", decode(1, 500))
    prompt = StepShape(((4096, 0),), 0, 0, 1)
    assert a100("int4", prompt) > 0.95 * a100("bf16", prompt)
    assert model(weight_dtype="fp8").step_s(prompt) < 0.95 * model(weight_dtype="bf16").step_s(prompt)


def test_a_sliding_window_bounds_the_cost_of_context():
    facts = load_llm("gemma-3-27b")
    plain = build("roofline", {}, llm=dataclasses.replace(facts, sliding_window=None), gpu=load_gpu("h100-sxm"))
    windowed = build("roofline", {}, llm=facts, gpu=load_gpu("h100-sxm"))
    assert windowed.step_s(decode(8, 500)) == pytest.approx(plain.step_s(decode(8, 500)), rel=1e-12)
    assert windowed.step_s(decode(8, 50_000)) < 0.5 * plain.step_s(decode(8, 50_000))
    assert windowed.step_s(StepShape(((900, 0),), 0, 0, 1)) == pytest.approx(plain.step_s(StepShape(((900, 0),), 0, 0, 1)), rel=1e-12)
    assert windowed.step_s(StepShape(((2048, 60_000),), 0, 0, 1)) < plain.step_s(StepShape(((2048, 60_000),), 0, 0, 1))


def test_which_side_binds():
    assert model().describe(decode(1, 500))["bottleneck"] == "memory"
    assert model().describe(StepShape(((4096, 0),), 0, 0, 1))["bottleneck"] == "compute"
    assert model("smollm2-135m", "b200-sxm", options={"host_step_s": 0.0}).describe(decode(1, 10))["bottleneck"] == "launch"


def test_an_all_reduce_from_outside_is_used():
    slow = model(tensor_parallel=2, all_reduce_s=lambda tensor_bytes: 1e-3)
    assert slow.describe(decode(4, 10))["sides"]["link"] == pytest.approx(66e-3)  # two a layer, the embedding, the logits
    assert slow.step_s(decode(4, 10)) > 66e-3
    assert model(tensor_parallel=1, all_reduce_s=lambda tensor_bytes: 1e-3).describe(decode(4, 10))["sides"]["link"] == 0


def test_all_reduce_fits_hold_only_for_the_link_they_were_measured_on():
    nvlink, pcie = (model(gpu=name, tensor_parallel=2).describe(decode(256, 10))["sides"]["link"] for name in ("a100-sxm-80gb", "a10g"))
    assert pcie > 3 * nvlink


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_step": 1}, r"latency.host_step: unknown option \(did you mean 'host_step_s'\?\)"),
        ({"host_step_s": -1}, "latency.host_step_s: must be a number that is not negative"),
        ({"launch_s": "fast"}, "latency.launch_s"),
        ({"capture_sizes": ["a"]}, "latency.capture_sizes: must be a list of whole numbers"),
        ({"capture_sizes": [0]}, "latency.capture_sizes: captured sizes must lie"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        model(options=options)


def test_unknown_models_dtypes_and_splits_are_named():
    with pytest.raises(InputError, match=r"latency.name: there is no latency model named 'rofline' \(did you mean 'roofline'"):
        build("rofline", {}, llm=load_llm("llama-3.1-8b"), gpu=load_gpu("l4"))
    with pytest.raises(InputError, match=r"kv_cache\.dtype: unknown KV dtype 'fp9'"):
        model(kv_dtype="fp9")
    with pytest.raises(InputError, match="weight_dtype: unknown dtype 'bf61'"):
        model(weight_dtype="bf61")
    with pytest.raises(InputError, match=r"cluster\.tensor_parallel: 3 does not divide"):
        model(tensor_parallel=3)
