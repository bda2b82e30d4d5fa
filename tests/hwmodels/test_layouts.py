"""Layouts in the memory and the step model: what each degree of parallelism saves, costs, and leaves as it was."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.expert_load import balanced, busiest_rank
from hwmodels.group_links import of_gpu
from hwmodels.latency import build
from hwmodels.parallel import pipeline_bubble
from hwmodels.pipeline import Pipeline, makespan_s, micro_shapes, tokens_of
from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.layout import Layout
from serving.memory import kv_capacity
from serving.plan import StepShape
from serving.policies import load, names
from serving.scenario.parallel import Experts

NO_HOST = {"host_step_s": 0.0, "host_sequence_s": 0.0, "launch_s": 0.0, "graph_launch_s": 0.0}
LLAMA, H100 = load_llm("llama-3.1-70b"), load_gpu("h100-sxm")
DECODE = StepShape((), 64, 64 * 1000, 64)


def model(layout, llm="llama-3.1-70b", gpu="h100-sxm", options=None, **more):
    return build("roofline", {**NO_HOST, **(options or {})}, llm=load_llm(llm), gpu=load_gpu(gpu), layout=layout, **more)


def capacity(layout, llm="llama-3.1-70b", gpu="h100-sxm"):
    return kv_capacity(load_llm(llm), load_gpu(gpu), layout=layout, max_model_len=1, activation_gib=0.0, non_torch_gib=0.0, block_tokens=1)


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("llm", ["llama-3.1-70b", "qwen3-32b", "mistral-small-24b"])
def test_m5_the_second_copy_of_the_weights_is_paid_from_the_pool(llm):
    facts = load_llm(llm)
    four, eight = (capacity(Layout(tensor_parallel=n), llm) for n in (4, 8))
    whole = 8 * Layout(tensor_parallel=8).weight_bytes(facts), facts.kv_bytes_per_token()
    assert eight.kv_tokens == pytest.approx(2 * four.kv_tokens + whole[0] / whole[1], rel=0.002)


@pytest.mark.parametrize("llm", ["llama-3.1-8b", "llama-3.1-70b", "qwen2.5-0.5b", "deepseek-v3", "mixtral-8x7b", "gemma-2-9b"])
def test_stages_hold_all_weights_between_them(llm):
    facts = load_llm(llm)
    assert Layout().weight_bytes(facts) == facts.weight_bytes()
    for stages in (2, 3, 7):
        parts = Layout(stages=stages).stage_llms(facts)
        assert sum(part.layers for part in parts) == facts.layers
        assert sum(part.moe_layers for part in parts) == facts.moe_layers
        assert sum(part.sliding_window.layers if part.sliding_window else 0 for part in parts) == (facts.sliding_window.layers if facts.sliding_window else 0)
        fullest = Layout(stages=stages).weight_bytes(facts)
        assert facts.weight_bytes() / stages <= fullest * 1.05 and fullest < facts.weight_bytes()


def test_kv_of_a_stage_is_that_of_its_layers():
    assert Layout(stages=4).kv_bytes_per_token(LLAMA) == LLAMA.kv_bytes_per_token() / 4
    assert Layout(stages=3).kv_bytes_per_token(LLAMA) == LLAMA.kv_bytes_per_token() * 27 / 80  # the fullest


@pytest.mark.parametrize("llm", ["llama-3.1-70b", "qwen3-32b", "deepseek-v2-lite", "llama-2-7b"])
def test_b6_bytes_on_the_fullest_gpu(llm):
    facts = load_llm(llm)
    whole = facts.kv_bytes_per_token()
    held = {name: load("sharding", name).layout(facts, 16).kv_bytes_per_token(facts) for name in names("sharding")}
    assert held["sequence"] == -(-whole // 16)
    assert held["head"] == facts.kv_bytes_per_token("bf16", 16) >= held["sequence"]  # heads are copied once there are too few
    assert held["head_then_sequence"] == held["sequence"]
    assert held["layer"] == whole * -(-facts.layers // 16) / facts.layers


def test_every_sharding_policy_uses_as_many_gpus_as_it_was_given():
    for name, gpus in itertools.product(names("sharding"), (1, 2, 4, 8)):
        assert load("sharding", name).layout(LLAMA, gpus).gpus == gpus


def test_experts_in_whole_weigh_what_their_slices_weigh():
    mixtral = load_llm("mixtral-8x7b")
    assert Layout(tensor_parallel=4, expert_parallel=4).weight_bytes(mixtral) == Layout(tensor_parallel=4).weight_bytes(mixtral)
    groups = Layout(tensor_parallel=1, expert_parallel=8)
    assert groups.data == 8 and groups.gpus == 8
    assert groups.weight_bytes(mixtral) > Layout(tensor_parallel=8).weight_bytes(mixtral)  # attention weights are copied
    assert groups.kv_bytes_per_token(mixtral) == mixtral.kv_bytes_per_token() / 8


# -- steps --------------------------------------------------------------------------------------------------------------


def test_one_token_takes_as_long_through_stages_as_through_one_gpu_and_the_hops():
    llm, gpu = load_llm("llama-3.1-8b"), load_gpu("h100-sxm")
    one = StepShape((), 1, 500, 1)
    plain = build("roofline", NO_HOST, llm=llm, gpu=gpu).step_s(one)
    hop = of_gpu(gpu, Layout(stages=4)).send_s(llm.hidden * 2)
    for schedule in ("flush", "steady"):
        staged = model(Layout(stages=4), "llama-3.1-8b", options={"schedule": schedule}).step_s(one)
        assert staged == pytest.approx(plain + 3 * hop, rel=1e-3)  # but for norms that only the last stage has


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 3)])
def test_a_flushed_pipeline_idles_as_gpipe_says(stages, micro_batches):
    class Even:
        def step_s(self, shape):
            return 1e-3

    flush = Pipeline([Even()] * stages, micro_batches, lambda tokens: 0.0, steady=False)
    steady = Pipeline([Even()] * stages, micro_batches, lambda tokens: 0.0, steady=True)
    took = flush.step_s(DECODE)
    assert 1 - micro_batches * 1e-3 / took == pytest.approx(pipeline_bubble(stages, micro_batches))
    assert steady.step_s(DECODE) == pytest.approx(max(stages, micro_batches) * 1e-3)


def test_unequal_micro_batches_by_hand():
    # Stage 0: 0-2, 2-3. Stage 1: 2.5-3.5 (a hop of 0.5), then 3.5-6.5.
    assert makespan_s([[2.0, 1.0], [1.0, 3.0]], [0.5, 0.5]) == pytest.approx(6.5)


@given(chunks=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9000)), max_size=4), decodes=st.integers(0, 300), count=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_micro_batches_hold_the_whole_step(chunks, decodes, count):
    shape = StepShape(tuple(chunks), decodes, decodes * 100, decodes + len(chunks))
    parts = micro_shapes(shape, count)
    assert len(parts) <= count
    assert sum(map(tokens_of, parts)) == tokens_of(shape)
    assert sum(part.decodes for part in parts) == decodes
    pieces = [piece for part in parts for piece in part.chunks]
    for new, before in chunks:  # its pieces, in order, follow each other without a gap
        at = before
        while at < before + new:
            taken, begin = pieces.pop(0)
            assert begin == at
            at += taken
        assert at == before + new
    sizes = [sum(new for new, _ in part.chunks) for part in parts]
    assert not any(chunks) or max(sizes) <= -(-sum(new for new, _ in chunks) // min(count, tokens_of(shape)))


@given(decodes=st.integers(1, 300), context=st.integers(1, 5000), steps=st.integers(1, 20),
       layout=st.sampled_from([Layout(stages=4), Layout(tensor_parallel=2, ring=2), Layout(tensor_parallel=8, kv_shards=4), Layout(tensor_parallel=2, stages=3)]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_runs_are_bit_for_bit_their_steps(decodes, context, steps, layout):
    priced = model(layout)
    shape = StepShape((), decodes, decodes * context, decodes)
    assert priced.run_s(shape, steps) == [priced.step_s(shape._replace(decode_context_tokens=decodes * (context + i))) for i in range(steps)]


def test_a_ring_divides_a_prompt_and_overlaps_its_transfers():
    shape = StepShape(((60_000, 0),), logits_rows=1)
    plain = model(Layout(tensor_parallel=2)).step_s(shape)
    ring = model(Layout(tensor_parallel=2, ring=4)).step_s(shape)
    serial = model(Layout(tensor_parallel=2, ring=4), options={"ring_overlap": False}).step_s(shape)
    assert plain / 4 < ring < plain / 3 and ring < serial < plain


def test_kv_shards_read_less_and_exchange_more():
    head, sequence = (model(Layout(tensor_parallel=16, kv_shards=n)) for n in (1, 2))  # 8 KV heads: the second copies are shared out
    few, many = StepShape((), 4, 4 * 100, 4), StepShape((), 64, 64 * 30_000, 64)
    assert sequence.step_s(few) > head.step_s(few) and sequence.step_s(many) < head.step_s(many)
    assert "merge_shards" in sequence.describe(few)["operators"]


def test_fewer_chunks_than_attention_groups_leave_groups_idle():
    groups = model(Layout(expert_parallel=8), "mixtral-8x7b")
    one, eight = StepShape(((4096, 0),), logits_rows=1), StepShape(((512, 0),) * 8, logits_rows=8)
    assert groups.step_s(one) > 1.3 * groups.step_s(eight)


def test_an_imbalance_stretches_experts_and_nothing_else():
    even, skewed = (model(Layout(tensor_parallel=4, expert_parallel=4), "mixtral-8x7b", imbalance=i) for i in (1.0, 2.0))
    shape = StepShape(((8192, 0),), logits_rows=1)
    one, two = even.describe(shape)["operators"], skewed.describe(shape)["operators"]
    assert 1.8 * one["experts"]["seconds"] < two["experts"]["seconds"] < 2 * one["experts"]["seconds"]  # the weights are read once
    assert all(two[name] == one[name] for name in one if not name.startswith("expert"))


def test_the_busiest_rank():
    mixtral, layout = load_llm("mixtral-8x7b"), Layout(tensor_parallel=4, expert_parallel=4)
    assert busiest_rank(Experts(), mixtral, layout, np.random.default_rng(1)) == 1.0
    measured = Experts(load=(8.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), placement="balanced")
    assert busiest_rank(measured, mixtral, layout, np.random.default_rng(1)) == pytest.approx(9 / 5.5)
    assert balanced([4.0, 3.0, 2.0, 1.0], 2) == [4.0, 1.0, 3.0, 2.0]
    drawn = [busiest_rank(Experts(zipf=1.0), mixtral, layout, np.random.default_rng(seed)) for seed in range(20)]
    best = busiest_rank(Experts(zipf=1.0, placement="balanced"), mixtral, layout, np.random.default_rng(0))
    assert best <= min(drawn) and max(drawn) < 4


def test_models_that_cannot_price_a_layout_say_so():
    with pytest.raises(InputError, match=r"latency\.name: 'fitted' prices tensor parallelism only"):
        build("fitted", {}, llm=LLAMA, gpu=H100, layout=Layout(stages=2))
    with pytest.raises(InputError, match=r"latency\.schedule"):
        model(Layout(stages=2), options={"schedule": "flushed"})


def test_an_engine_that_reduces_by_the_library_pays_more_for_small_vectors():
    shape = StepShape((), 1, 500, 1)
    for degree in (2, 4, 8):
        kernels, library = (model(Layout(tensor_parallel=degree), "qwq-32b", "a100-sxm-80gb", {"all_reduce": name}) for name in ("kernels", "library"))
        assert library.step_s(shape) > kernels.step_s(shape) + 129 * 5e-6
