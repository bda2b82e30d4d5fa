"""The catalogue: complete, sourced, consistent with published sizes, and clear about what is wrong with a file."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.catalog import CATALOG, load_gpu, load_llm, names
from serving.errors import InputError

GPUS, LLMS = names("gpus"), names("llms")


def test_there_are_at_least_22_gpus_and_20_llms():
    assert len(GPUS) >= 22
    assert len(LLMS) >= 20


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_loads_with_its_name_and_a_source_for_each_figure(name):
    gpu = load_gpu(name)
    assert gpu.name == name
    facts = {"memory_bytes", "memory_bytes_per_s", "flops", "pcie", "tdp_w"}
    facts |= {fact for fact in ("scale_up", "usable_memory_bytes", "sm_count", "price_usd_per_h") if getattr(gpu, fact) is not None}
    assert facts <= set(gpu.sources)
    assert all(gpu.sources.values())
    assert gpu.usable_memory_bytes is None or gpu.usable_memory_bytes <= 1.03 * gpu.memory_bytes


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_dense_and_ordered(name):
    flops = load_gpu(name).flops
    assert flops["bf16"] <= flops.get("fp8", flops["bf16"]) <= flops.get("fp4", float("inf"))
    assert flops.get("fp8", 0) <= 2.05 * flops["bf16"]  # a sparse figure would be four times bf16


@pytest.mark.parametrize("name", LLMS)
def test_every_llm_loads_with_its_name_and_source(name):
    llm = load_llm(name)
    assert llm.name == name
    assert "huggingface.co/" in llm.source


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74), ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.85), ("qwen2.5-7b", 7.62),
        ("qwen3-8b", 8.19), ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("qwen3-235b-a22b", 235.09),
        ("mistral-7b", 7.25), ("mistral-small-24b", 23.57), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.62), ("phi-4", 14.66),
        ("gemma-2-9b", 9.24), ("gemma-2-27b", 27.23), ("smollm2-135m", 0.1345), ("deepseek-v3", 671.03), ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.8), ("deepseek-v2-lite", 15.71), ("kimi-k2", 1026.4),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name, billions):
    assert load_llm(name).parameters().total / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37), ("gpt-oss-120b", 5.1),
                                                ("mixtral-8x7b", 12.9)])  # fmt: skip
def test_active_parameters_are_near_the_published_ones(name, billions):
    assert load_llm(name).parameters().active / 1e9 == pytest.approx(billions, rel=0.08)


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-3.1-8b", 128), ("llama-3.1-70b", 320), ("llama-3.3-70b", 320), ("qwen3-32b", 256), ("qwen3-14b", 160), ("mistral-small-24b", 160),
     ("llama-2-7b", 512)],
)  # fmt: skip
def test_kv_bytes_per_token(name, kib):
    assert load_llm(name).kv_bytes_per_token() == kib * 1024


def test_mla_caches_the_latent_whatever_the_tensor_parallel_degree():
    llm = load_llm("deepseek-v3")
    assert llm.kv_bytes_per_token() == 61 * (512 + 64) * 2 == llm.kv_bytes_per_token(tensor_parallel=8)


def test_kv_heads_are_replicated_beyond_their_number():
    llm = load_llm("llama-3.1-8b")
    assert llm.kv_bytes_per_token(tensor_parallel=8) == llm.kv_bytes_per_token(tensor_parallel=16) == 16 * 1024
    assert llm.kv_bytes_per_token("fp8") * 2 == llm.kv_bytes_per_token("bf16")


@pytest.mark.parametrize("name", LLMS)
@given(tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]))
@settings(max_examples=5, deadline=None)
def test_shards_hold_at_least_their_share_of_the_weights(name, tensor_parallel):
    llm = load_llm(name)
    if llm.tensor_parallel_problem(tensor_parallel):
        with pytest.raises(InputError, match="divide"):
            llm.weight_bytes(tensor_parallel=tensor_parallel)
        return
    whole, shard = llm.weight_bytes(), llm.weight_bytes(tensor_parallel=tensor_parallel)
    assert whole <= shard * tensor_parallel + tensor_parallel  # what is replicated is counted on each
    assert shard <= whole
    assert llm.weight_bytes("int4", tensor_parallel) <= llm.weight_bytes("fp8", tensor_parallel) <= llm.weight_bytes("bf16", tensor_parallel)


def test_quantised_checkpoints_keep_the_vocabulary_at_bf16():
    assert load_llm("llama-3.1-70b").weight_bytes("fp8") / 2**30 == pytest.approx(67.72, abs=0.1)  # as loaded by vLLM


def test_facts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_gpu("h100-sxm").tdp_w = 1
    assert load_gpu("h100-sxm") is load_gpu("h100-sxm")


def entry(kind, name):
    return yaml.safe_load((CATALOG / kind / f"{name}.yaml").read_text())


def written(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return str(path)


def test_a_file_of_the_same_form_loads(tmp_path):
    assert load_gpu(written(tmp_path, entry("gpus", "l40s") | {"name": "mine", "tdp_w": 300})).tdp_w == 300
    assert load_llm(written(tmp_path, entry("llms", "qwen3-8b") | {"layers": 1})).layers == 1


def test_a_gpu_file_may_carry_its_own_kernels(tmp_path):
    data = entry("gpus", "l40s") | {"kernels": entry("kernels", "h100-sxm")}
    assert load_gpu(written(tmp_path, data)).kernels == load_gpu("h100-sxm").kernels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_byte": 1}, r"mine.yaml:memory_byte: unknown key \(did you mean 'memory_bytes'\?\)"),
        ({"pcie": {"kind": "x", "bytes_per_s": 1, "latencys": 0}}, r"pcie.latencys: unknown key \(did you mean 'latency_s'\?\)"),
        ({"memory_bytes": -1}, "mine.yaml:memory_bytes: .*greater than 0.*got -1"),
        ({"kernels": "hopper"}, "mine.yaml:kernels: there is no kernel set named 'hopper'"),
        ({"sources": {}}, "sources lacks an entry for memory_bytes"),
        ({"flops": {"fp8": 1}}, "flops needs a bf16 entry"),
        ({"tdp_w": "hot"}, "mine.yaml:tdp_w: .*number.*got 'hot'"),
    ],
)
def test_a_bad_gpu_file_says_what_is_wrong_where(tmp_path, change, message):
    path = written(tmp_path, entry("gpus", "h100-sxm") | change)
    with pytest.raises(InputError, match=message) as error:
        load_gpu(path)
    assert "\n" not in str(error.value)


def test_kernels_that_would_beat_the_datasheet_are_refused(tmp_path):
    kernels = entry("kernels", "h100-sxm")
    kernels["gemm"]["bf16"]["memory_efficiency"] = 1.2
    with pytest.raises(InputError, match=r"kernels\.gemm\.bf16: .*beat the datasheet"):
        load_gpu(written(tmp_path, entry("gpus", "h100-sxm") | {"kernels": kernels}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_head": 8}, r"kv_head: unknown key \(did you mean 'kv_heads'\?\)"),
        ({"kv_heads": 7}, "heads .32. is no multiple of kv_heads"),
        ({"weight_dtype": "bf61"}, "weight_dtype: did you mean 'bf16'"),
        ({"moe": {"experts": 4, "experts_per_token": 8, "expert_intermediate": 1}}, "moe: experts_per_token exceeds experts"),
    ],
)
def test_a_bad_llm_file_says_what_is_wrong_where(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        load_llm(written(tmp_path, entry("llms", "llama-3.1-8b") | change))


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00", "just words"])
def test_what_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=r"mine\.yaml(:\d+)?: (must hold|is not valid)"):
        load_llm(written(tmp_path, text))


def test_unknown_names_and_missing_files_hint_at_the_nearest():
    with pytest.raises(InputError, match=r"cluster.gpu: there is no GPU named 'h100_sxm'.*did you mean 'h100-sxm'"):
        load_gpu("h100_sxm")
    with pytest.raises(InputError, match=r"llm: cannot read 'no/such.yaml'"):
        load_llm("no/such.yaml")


@given(st.dictionaries(st.sampled_from(["name", "layers", "moe", "mla", "heads", "x"]),
                       st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=2)
                                    | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4)))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_other_content_is_an_input_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.safe_dump(entry("llms", "mixtral-8x7b") | data))
    try:
        load_llm(str(path))
    except InputError as error:
        assert re.match(r".*fuzz\.yaml", str(error))
