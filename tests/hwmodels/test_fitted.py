"""The fitted latency model: runs equal steps bit for bit, nothing is negative, fits of something else are refused."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels import latency
from hwmodels.fitted import DEVICE_TERMS, FORMAT, HOST_TERMS, Coefficients, Fitted, beyond_terms_s, load
from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.plan import StepShape

seconds = st.floats(0, 1e-2, allow_subnormal=False)
coefficients = st.builds(
    Coefficients,
    st.fixed_dictionaries(dict.fromkeys(DEVICE_TERMS, seconds)),
    st.fixed_dictionaries(dict.fromkeys(HOST_TERMS, seconds)),
    st.sampled_from([(), (1, 2, 4, 8, 16)]),
    st.dictionaries(st.integers(1, 64), st.floats(-1e-2, 1e-2, allow_subnormal=False), max_size=4),
)
chunk = st.tuples(st.integers(1, 4096), st.integers(0, 100_000))


@given(coefficients, st.integers(0, 300), st.integers(0, 10**6), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_a_run_is_its_steps_bit_for_bit(fit, decodes, context, steps):
    model, again = Fitted(fit), Fitted(fit)
    shape = StepShape(decodes=decodes, decode_context_tokens=context, logits_rows=decodes)
    one_by_one = [again.step_s(shape._replace(decode_context_tokens=context + i * decodes)) for i in range(steps)]
    assert model.run_s(shape, steps) == one_by_one


@given(coefficients, st.lists(chunk, max_size=4), st.integers(0, 300), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_no_step_is_negative_and_each_is_the_sum_of_its_terms(fit, chunks, decodes, context):
    context = context if decodes else 0
    shape = StepShape(tuple(chunks), decodes, context, decodes + len(chunks))
    model = Fitted(fit)
    rows, path = model.path(shape)
    terms = {
        "constant": 1, "tokens": rows, "several_tokens": rows > 1, "remainder_tiles": (rows % 4).bit_count(), "any_decode": decodes > 0, "decodes": decodes,
        "decode_context_tokens": context, "prefill_seqs": len(chunks), "query_key_pairs": sum(n * (b + (n + 1) / 2) for n, b in chunks),
        "prefill_context_tokens": sum(b for _, b in chunks), "eager": bool(fit.graph_sizes) and path == "eager",
    }  # fmt: skip
    host = {"constant": 1, "sequences": decodes + len(chunks), "tokens": rows, "logits_rows": shape.logits_rows}
    expected = sum(fit.device[name] * value for name, value in terms.items()) + sum(fit.host[name] * value for name, value in host.items())
    if not chunks and decodes and fit.decode_batches_s:  # the line's beginning is moved, not below 0
        slope = fit.device["decode_context_tokens"] * context
        expected = max(0.0, expected - slope + float(beyond_terms_s(fit.decode_batches_s, decodes))) + slope
    assert model.step_s(shape) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert model.step_s(shape) >= 0


def test_what_a_batch_size_takes_beyond_its_terms_is_interpolated_and_constant_at_the_ends():
    flat = dict.fromkeys(DEVICE_TERMS, 0.0) | {"constant": 0.004}
    model = Fitted(Coefficients(flat, dict.fromkeys(HOST_TERMS, 0.0), (), {2: 0.001, 4: -0.001}))
    decoding = [model.step_s(StepShape(decodes=count)) for count in (1, 2, 3, 4, 9)]
    assert decoding == pytest.approx([0.005, 0.005, 0.004, 0.003, 0.003])
    assert model.step_s(StepShape(((5, 0),), decodes=2, logits_rows=3)) == 0.004, "a step with a chunk has kernels of its own"


def fit_file(folder, **changes):
    data = {"format": FORMAT, "llm": "llama-3.1-8b", "gpu": "h100-sxm", "tensor_parallel": 1, "device_s": {"constant": 0.004}, "host_s": {"constant": 0.001}}
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


def build(path, **options):
    return latency.build("fitted", {"file": str(path), **options}, llm=load_llm("llama-3.1-8b"), gpu=load_gpu("h100-sxm"))


def test_a_file_becomes_a_model(tmp_path):
    assert build(fit_file(tmp_path)).step_s(StepShape(decodes=1)) == 0.005


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llm": "qwen3-8b"}, "fitted with llm qwen3-8b, not llama-3.1-8b"),
        ({"gpu": "l4"}, "fitted with gpu l4"),
        ({"device_s": {"constant": -1.0}}, "device_s.constant: must be a number of seconds that is not negative"),
        ({"device_s": {"constnt": 1.0}}, "did you mean 'constant'"),
        ({"host_s": [1]}, "host_s: must hold the coefficients"),
        ({"decode_batches_s": [1]}, "decode_batches_s: must hold seconds, by batch size"),
        ({"decode_batches_s": {0: 0.1}}, "decode_batches_s.0: must be a number of seconds, of a batch size from 1"),
        ({"decode_batches_s": {2: float("nan")}}, "decode_batches_s.2: must be a number"),
        ({"format": 7}, "is no fit of format"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        build(fit_file(tmp_path, **changes))


def test_a_fit_of_another_device_may_be_asked_for(tmp_path):
    assert build(fit_file(tmp_path, gpu="l4"), transfer=True).step_s(StepShape(decodes=1)) == 0.005


def test_no_such_fit():
    with pytest.raises(InputError, match="there is no fit 'nowhere'"):
        load("nowhere")
