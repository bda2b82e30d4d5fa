"""Layers that read the KV entries of an earlier one: who shares, what a token then costs, what a step then costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels import latency
from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.layer_reuse import reusing
from serving.llm import Llm
from serving.plan import StepShape
from serving.policies import load as load_policy
from serving.scenario import load
from sim.fleet import resolve
from sim.run import simulate

LLAMA = load_llm("llama-3.1-8b")
H100 = load_gpu("h100-sxm")
DECODE = StepShape((), 16, 160_000, 10_000)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60), st.floats(0.5, 0.99), st.integers(1, 5))
def test_groups_are_bounded_and_certainly_similar_and_no_wider_than_they_must_be_narrow(similarity, cosine, group):
    owners = load_policy("kv_reuse", "threshold", {"cosine": cosine, "group": group}).owners(similarity)
    assert len(owners) == len(similarity) + 1 and all(owners[owner] == owner <= layer for layer, owner in enumerate(owners))
    assert all(owners.count(owner) <= group for owner in owners)
    for layer in range(1, len(owners)):
        first = owners[layer - 1]
        angle = sum(math.acos(one) for one in similarity[first:layer])
        fits = angle < math.pi and math.cos(angle) > cosine and layer - first < group
        assert owners[layer] == (first if fits else layer)


def test_three_alike_layers_are_two_groups_of_pairs_or_one_of_three_if_the_sum_of_angles_allows_it():
    near = [0.98, 0.98, 0.5]
    owners = {group: load_policy("kv_reuse", "threshold", {"group": group}).owners(near) for group in (1, 2, 3)}
    assert owners == {1: [0, 1, 2, 3], 2: [0, 0, 2, 3], 3: [0, 0, 0, 3]}, "0.98 twice is 0.9208 at worst"
    assert load_policy("kv_reuse", "threshold", {"group": 3}).owners([0.97, 0.97, 0.5]) == [0, 0, 2, 3], "0.97 twice may be 0.88"
    assert load_policy("kv_reuse", "every", {"group": 3}).owners([0.0] * 4) == [0, 0, 0, 3, 3]


def sharing(layers: int) -> Llm:
    return replace(LLAMA, kv_layers=layers)


def test_a_token_costs_what_its_kv_layers_keep_and_reusing_layers_have_no_key_and_value_projections():
    half = sharing(16)
    assert half.kv_bytes_per_token() * 2 == LLAMA.kv_bytes_per_token()
    projections = 16 * 2 * LLAMA.kv_heads * LLAMA.head_dim * LLAMA.hidden
    assert LLAMA.parameters().attention - half.parameters().attention == projections
    assert LLAMA.weight_bytes() - half.weight_bytes() == 2 * projections
    assert sharing(32).parameters() == LLAMA.parameters() and sharing(32).kv_bytes_per_token() == LLAMA.kv_bytes_per_token()


def price(llm: Llm, **options: float) -> latency.LatencyModel:
    return latency.build("roofline", options, llm=llm, gpu=H100)


def attention_s(model: latency.LatencyModel) -> float:
    return model.step_s(DECODE) - model.step_s(StepShape((), 16, 0, 0))


def test_every_layer_reads_what_it_attends_to_unless_the_cache_answers():
    whole, again, cached = price(LLAMA), price(sharing(8)), price(sharing(8), kv_reread_from_cache=1.0)
    assert attention_s(again) == pytest.approx(attention_s(whole), rel=1e-12), "sharing alone reads no byte less"
    assert attention_s(whole) / 4 < attention_s(cached) < 0.27 * attention_s(whole), "what is not read is still computed"
    assert attention_s(price(sharing(8), kv_reread_from_cache=0.5)) == pytest.approx(attention_s(whole) * (8 + 12) / 32, rel=0.03)
    assert price(sharing(32), kv_reread_from_cache=1.0).step_s(DECODE) == whole.step_s(DECODE)
    assert cached.run_s(DECODE, 3) == [cached.step_s(DECODE._replace(decode_context_tokens=160_000 + 16 * i)) for i in range(3)]


def test_skipped_projections_make_prompts_a_little_cheaper():
    prompt = StepShape(((2048, 0),), 0, 0, 0)
    assert 0.9 < price(sharing(16)).step_s(prompt) / price(LLAMA).step_s(prompt) < 1.0


def test_the_scenario_holds_more_sequences_and_first_tokens_wait_less_near_saturation():
    near = ["workload.arrivals.rate_rps=1.3", "workload.requests=250"]
    with_reuse, without = load("layer-reuse", near), load("layer-reuse", [*near, "kv_cache.layer_reuse=null"])
    ours, plain = resolve(with_reuse), resolve(without)
    assert ours.llm.kv_layers == 25 and ours.capacity.kv_bytes_per_token * 32 == plain.capacity.kv_bytes_per_token * 25
    assert ours.capacity.kv_tokens > 1.27 * plain.capacity.kv_tokens
    shared, alone = (simulate(one, saturated_rps=1.0).summary for one in (with_reuse, without))
    assert shared["ttft_s"]["mean"] < alone["ttft_s"]["mean"] and shared["kv_utilisation"]["mean"] < alone["kv_utilisation"]["mean"]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["kv_cache.layer_reuse.similarity=[0.9, 0.9]"], "31 cosines"),
        (["kv_cache.layer_reuse.similarity=[1.2]"], "similarity"),
        (["kv_cache.layer_reuse.policy={name: threshold, cosine: 1.5}"], "cosine"),
        (["kv_cache.layer_reuse.policy=pairs"], "no kv_reuse policy"),
        (["latency.kv_reread_from_cache=2.0"], r"\[0, 1\]"),
        (["cluster.pipeline_parallel=2"], "one stage"),
        (["llm=gemma-2-9b", "max_model_len=8192"], "windows"),
        (["weights={early_exit: {exits: [{layer: 8, share: 0.5}]}}"], "equal layers"),
    ],
)
def test_mistakes_are_named(overrides, match):
    with pytest.raises(InputError, match=match):
        resolve(load("layer-reuse", overrides))


def test_a_policy_must_name_layers_that_keep_their_own(tmp_path):
    path = tmp_path / "later.py"
    path.write_text("class Later:\n    def owners(self, similarity):\n        return [0, *range(len(similarity))]\n")
    spec = load("layer-reuse", [f"kv_cache.layer_reuse.policy={path}:Later"]).kv_cache.layer_reuse
    with pytest.raises(InputError, match="keeps its own"):
        reusing(LLAMA, spec)
