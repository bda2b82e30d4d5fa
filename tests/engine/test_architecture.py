"""Shapes read from configurations and catalogue-like entries, and scaled down."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine's extra is not installed")

from engine.architecture import Architecture, RopeScaling, from_hf, from_llm, scaled_down
from serving.catalog import load_llm, names
from serving.errors import InputError

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip


def test_llama_31_8b():
    shape = from_hf(LLAMA_31_8B)
    assert shape.head_dim == 128 and shape.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert shape.parameters() == 8_030_261_248  # as published
    assert shape.kv_bytes_per_token(2) == 131072


def test_newer_configs_keep_rope_under_another_key():
    config = {k: v for k, v in LLAMA_31_8B.items() if k not in ("rope_theta", "rope_scaling")}
    shape = from_hf(config | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
    assert shape.rope_theta == 1e6 and shape.rope_scaling is None


def test_families_differ_in_what_their_config_leaves_unsaid():
    qwen2 = from_hf(LLAMA_31_8B | {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False})
    assert qwen2.qkv_bias and not qwen2.qk_norm and qwen2.window == 0
    qwen3 = from_hf(LLAMA_31_8B | {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": None, "head_dim": 64})
    assert qwen3.qk_norm and qwen3.head_dim == 64
    assert from_hf(LLAMA_31_8B | {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "sliding_window": 4096}).window == 4096


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not computed"),
        ({"architectures": ["GPT2LMHeadModel"]}, "not an architecture"),
        ({"architectures": None}, "not an architecture"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": [0]}, "mixes dense and expert layers"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_hf(LLAMA_31_8B | change)


def test_every_catalogue_entry_is_taken_or_refused_and_none_loses_a_weight():
    taken, refused = [], []
    for name in names("llms"):
        llm = load_llm(name)
        try:
            shape = from_llm(llm)
        except InputError as error:
            assert "which the engine does not compute" in error.problem
            refused.append(name)
            continue
        if not shape.shared_intermediate:  # a shared expert's own gate is Qwen's, not everybody's
            # The catalogue leaves biases' and head norms' few numbers out.
            assert llm.parameters().total == pytest.approx(shape.parameters(), rel=2e-4), name
        taken.append(name)
    assert {"llama-3.1-8b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-30b-a3b", "smollm2-135m"} <= set(taken)
    assert {"deepseek-v3", "gemma-2-9b"} <= set(refused)


def test_windows_are_spread_over_the_layers():
    shape = Architecture(6, 64, 4, 4, 16, 128, 50, window=8, window_layers=3)
    assert [shape.window_of(layer) for layer in range(6)] == [0, 8, 0, 8, 0, 8]
    assert [replace(shape, window_layers=0).window_of(layer) for layer in range(6)] == [8] * 6


def test_scaling_down_keeps_the_kind():
    full = replace(from_hf(LLAMA_31_8B), experts=64, experts_per_token=6, expert_intermediate=1408)
    small = scaled_down(full, layers=4, hidden=256, vocab=1000)
    assert (small.layers, small.hidden, small.vocab, small.heads // small.kv_heads) == (4, 256, 1000, 4)
    assert small.heads * small.head_dim == small.hidden
    assert (small.experts, small.experts_per_token, small.expert_intermediate) == (8, 6, 96)
    assert small.intermediate / small.hidden == full.intermediate / full.hidden
    assert scaled_down(Architecture(2, 64, 4, 4, 16, 128, 50), layers=8, hidden=32, vocab=99).kv_heads >= 1
