"""The memory model against figures from running servers (cases M1 to M6), and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.memory import GIB, blocks_for, blocks_in, check_capacity, kv_capacity

H100 = load_gpu("h100-sxm")
M1 = [  # llm, TP, fraction, weights, activation, non-torch, KV GiB
    ("llama-3.1-8b", 1, 0.90, 14.99, 4.76, 0.13, 51.38),
    ("llama-3.1-70b", 2, 0.90, 33.88, 4.84, 0.55, 32.00),
    ("qwen3-32b", 1, 0.90, 61.03, 5.64, 0.14, 4.45),
    ("qwen3-32b", 2, 0.90, 30.59, 5.64, 0.54, 34.49),
    ("mistral-small-24b", 1, 0.95, 44.76, 2.12, 0.14, 28.20),
]


@pytest.mark.parametrize(("name", "tp", "fraction", "weights", "activation", "beside", "kv"), M1)
def test_m1_the_pool_is_what_is_left(name, tp, fraction, weights, activation, beside, kv):
    capacity = kv_capacity(load_llm(name), H100, tensor_parallel=tp, memory_fraction=fraction, block_tokens=128, max_model_len=16000,
                           weights_gib=weights, activation_gib=activation, non_torch_gib=beside)  # fmt: skip
    assert capacity.kv_gib == pytest.approx(kv, abs=0.01)
    assert capacity.fits


def test_m1_a_maximum_length_that_the_pool_cannot_hold_is_refused_with_the_reason():
    terms = {"memory_fraction": 0.9, "block_tokens": 128, "weights_gib": 61.03, "activation_gib": 5.64, "non_torch_gib": 0.14}
    assert kv_capacity(load_llm("qwen3-32b"), H100, max_model_len=16000, **terms).fits
    refused = kv_capacity(load_llm("qwen3-32b"), H100, max_model_len=32000, **terms)
    assert not refused.fits
    assert refused.binding_limit == "max_model_len: a sequence of 32000 tokens needs 250 blocks, the pool has 141 (18048 tokens, 4.45 GiB)"
    with pytest.raises(InputError, match=r"cluster: does not fit: a sequence of 32000 tokens .*the limit is max_model_len"):
        check_capacity(refused, "cluster")


def test_m1_weights_that_leave_nothing_are_refused():
    refused = kv_capacity(load_llm("llama-3.1-70b"), H100, weights_gib=67.72, activation_gib=4.84, non_torch_gib=0.14, weight_dtype="fp8")
    assert refused.kv_gib < 0
    assert (refused.blocks, refused.kv_tokens, refused.usable_blocks, refused.fits) == (0, 0, 0, False)
    assert refused.binding_limit.startswith("gpu_memory: weights of 67.72 GiB")


def pool(llm, kv_gib, **options):
    """A capacity whose pool is exactly ``kv_gib``."""
    return kv_capacity(load_llm(llm), H100, memory_fraction=1.0, gpu_gib=kv_gib, weights_gib=0, activation_gib=0, non_torch_gib=0, **options)


def test_m2_one_block_is_reserved():
    capacity = pool("mistral-small-24b", 184_832 * 160 / 2**20, block_tokens=128, max_model_len=16000)
    assert (capacity.blocks, capacity.usable_blocks, capacity.kv_tokens) == (1444, 1443, 184_832)
    assert round(capacity.max_concurrency, 2) == 11.55
    assert blocks_for(15_049, 128) == 118


def test_m3_blocks_given_outright():
    capacity = kv_capacity(load_llm("llama-3.1-70b"), load_gpu("a100-sxm-80gb"), weight_dtype="int8", weights_gib=66.0, blocks=1381,
                           max_model_len=2048, block_tokens=16, memory_fraction=0.95, activation_gib=0.5, non_torch_gib=0.2)  # fmt: skip
    assert round(capacity.max_concurrency, 2) == 10.79
    assert capacity.kv_gib == pytest.approx(6.74, abs=0.005)
    assert capacity.fits


def test_m4_two_long_prompts_cannot_both_stay():
    capacity = pool("qwen3-14b", 6.51, max_model_len=32768)
    assert (capacity.blocks, capacity.kv_tokens) == (2666, 42_656)
    assert round(capacity.max_concurrency, 2) == 1.30
    assert capacity.fits
    assert 2 * blocks_for(32_600, 16) > capacity.usable_blocks


@given(weights=st.integers(40, 200), gpu=st.integers(60, 190))
@settings(max_examples=40, deadline=None)
def test_m5_the_second_copy_of_the_weights_is_paid_from_the_pool(weights, gpu):
    llm = load_llm("llama-3.1-70b")

    def tokens(tp):
        return kv_capacity(llm, H100, tensor_parallel=tp, memory_fraction=1.0, gpu_gib=gpu, weights_gib=weights / tp, activation_gib=0,
                           non_torch_gib=0, block_tokens=1).kv_tokens  # fmt: skip

    expected = 2 * tokens(4) + weights * GIB / llm.kv_bytes_per_token()
    assert tokens(8) == pytest.approx(expected, abs=2)


def test_m6_an_fp8_cache_holds_twice_the_tokens_and_the_half_block_too():
    half_a_block_more = (389_872 / 16 + 0.6) * 16 * 147_456 / GIB
    assert pool("qwen3-8b", half_a_block_more).kv_tokens == 389_872
    assert pool("qwen3-8b", half_a_block_more, kv_dtype="fp8").kv_tokens == 779_760


def test_computed_terms_are_near_a_running_server():
    capacity = kv_capacity(load_llm("llama-3.1-8b"), H100)
    assert capacity.weights_gib == pytest.approx(14.99, abs=0.05)
    assert capacity.non_torch_gib == pytest.approx(0.13, abs=0.01)
    assert kv_capacity(load_llm("llama-3.1-8b"), H100, tensor_parallel=2).non_torch_gib == pytest.approx(0.55, abs=0.1)


@given(kv_bytes=st.floats(-1e12, 1e12), block_tokens=st.integers(1, 256), per_token=st.integers(1, 10**6))
def test_blocks_are_whole_and_fit(kv_bytes, block_tokens, per_token):
    blocks = blocks_in(kv_bytes, block_tokens, per_token)
    assert blocks >= 0
    assert blocks == 0 or blocks * block_tokens * per_token <= kv_bytes
    assert (blocks + 1) * block_tokens * per_token > kv_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_fraction": 0.0}, r"kv_cache.memory_fraction: must lie in \(0, 1\]"),
        ({"memory_fraction": float("nan")}, "memory_fraction"),
        ({"block_tokens": 0}, "kv_cache.block_tokens: must be at least 1"),
        ({"max_model_len": 0}, "kv_cache.max_model_len"),
        ({"weights_gib": -1.0}, "kv_cache.weights_gib: must be a number of GiB that is not negative"),
        ({"gpu_gib": float("inf")}, "kv_cache.gpu_gib"),
        ({"tensor_parallel": 3}, r"cluster.tensor_parallel: 3 does not divide the 32 attention heads.*choose from: 1, 2, 4"),
        ({"kv_dtype": "fp9"}, "kv_dtype: unknown dtype 'fp9'"),
        ({"blocks": 10**7}, None),
    ],
)
def test_bad_values_are_named(options, message):
    if message is None:
        assert kv_capacity(load_llm("llama-3.1-8b"), H100, **options).binding_limit.startswith("blocks: the pool of")
        return
    with pytest.raises(InputError, match=message):
        kv_capacity(load_llm("llama-3.1-8b"), H100, **options)
