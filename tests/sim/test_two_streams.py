"""Two streams on one GPU: bounds of the overlap, what it changes and what it leaves alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels import latency
from hwmodels.two_streams import Stream, overlapped_s
from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.plan import StepShape
from serving.scenario import load
from sim.run import simulate

streams = st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 0.5)).map(lambda t: Stream(max(t[0], t[1]) + t[2], t[0], t[1]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(streams, streams, st.floats(0.0, 1.0))
def test_an_overlap_lies_between_its_longest_part_and_the_sum(one, other, contention):
    seconds = overlapped_s(one, other, contention)
    serial = one.seconds + other.seconds
    assert max(one.seconds, other.seconds) <= seconds <= serial + 1e-12
    assert seconds >= one.compute_s + other.compute_s - 1e-12 and seconds >= one.memory_s + other.memory_s - 1e-12
    assert overlapped_s(one, other, 1.0) == pytest.approx(max(serial, overlapped_s(one, other, 0.0)))


def model(contention: float):
    return latency.build("roofline", {"stream_contention": contention}, llm=load_llm("llama-3.1-8b"), gpu=load_gpu("h100-sxm"))


def test_decodes_bound_by_memory_vanish_behind_a_prompt_bound_by_compute():
    chunks, rows = ((2048, 0),), 33
    fused = StepShape(chunks, 32, 32 * 4000, rows)
    apart = fused._replace(streams=2)
    prompt = StepShape(chunks, 0, 0, 1)
    decodes = StepShape((), 32, 32 * 4000, 32)
    priced = model(0.0)
    assert priced.step_s(prompt) <= priced.step_s(apart) < priced.step_s(fused)
    assert priced.step_s(apart) >= priced.step_s(decodes)
    assert model(0.0).step_s(apart) <= model(0.5).step_s(apart) <= model(1.0).step_s(apart)


def test_alone_a_stream_has_the_gpu_to_itself():
    priced = model(0.3)
    for shape in (StepShape(((512, 100),), 0, 0, 1), StepShape((), 16, 16_000, 16)):
        assert priced.step_s(shape._replace(streams=2)) == priced.step_s(shape)


def run(*overrides: str) -> dict:
    return simulate(load("two-streams", ["workload.requests=300", *overrides])).summary


def test_overlap_serves_more_with_shorter_gaps_than_one_stream_and_than_stopping_the_decodes():
    two, one, stopping = run(), run("policy.batching=chunked_prefill"), run("policy.batching=prefill_first")
    assert two["tpot_s"]["mean"] < one["tpot_s"]["mean"] < stopping["tpot_s"]["mean"]
    assert two["itl_s"]["p99"] < stopping["itl_s"]["p99"]
    assert two["load_factor"] < one["load_factor"] < stopping["load_factor"]


def test_short_chunks_give_short_gaps_for_later_first_tokens():
    small, whole = run("policy.batching={name: two_streams, prefill_tokens: 256}"), run()
    assert small["itl_s"]["p99"] < whole["itl_s"]["p99"]
    assert small["ttft_s"]["mean"] > whole["ttft_s"]["mean"]


def test_runs_steps_and_audits_agree():
    scenario = load("two-streams", ["workload.requests=80"])
    plain = simulate(scenario, saturated_rps=1.0).summary
    assert simulate(scenario, stepwise=True, saturated_rps=1.0).summary["itl_s"] == plain["itl_s"]
    assert simulate(scenario, audit=0.5, saturated_rps=1.0).summary["itl_s"] == plain["itl_s"]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["policy.batching={name: two_streams, prefill_tokens: 0}"], "prefill_tokens"),
        (["latency={name: roofline, stream_contention: 2}"], "stream_contention"),
        (["cluster.pipeline_parallel=2"], "two streams"),
    ],
)
def test_mistakes_are_named(overrides, match):
    with pytest.raises(InputError, match=match):
        run(*overrides)
