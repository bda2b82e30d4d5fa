"""The table model: what a step of known kernels costs, and that runs of decodes are the same to the last bit."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_folders import attention_us, skew_alpha, write_layerwise

from hwmodels.profiles.grid import ExtrapolationWarning
from hwmodels.table import build
from serving.errors import InputError
from serving.plan import StepShape

LAYERS = 4
LLM = SimpleNamespace(name="four-layers", layers=LAYERS, heads=8, kv_heads=2, moe=None)
HOST = SimpleNamespace(step_s=0.001, sequence_s=1e-5, launch_s=1e-3)
GPU = SimpleNamespace(name="linear", sm_count=8, host=HOST)  # the attention kernel stops splitting at 0.8 * 2 * 8 / 2 = 6.4 decodes


class Plan:
    """A plan that knows its decode contexts, as the scheduler's does."""

    query_tokens_per_decode = 1

    def __init__(self, contexts: list[int], chunks: tuple = ()) -> None:
        self.contexts, self.chunks = contexts, chunks
        self.decodes, self.decode_context_tokens = len(contexts), sum(contexts)
        self.logits_rows = self.decodes

    def decode_contexts(self) -> list[int]:
        return self.contexts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_layerwise(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def table(folder):
    return build({"profile": str(folder), "capture_sizes": [1, 8, 32], "launch_s": 0}, llm=LLM, gpu=GPU)


@pytest.fixture(scope="module")
def skewed(folder):
    return build({"profile": str(folder), "capture_sizes": [1, 8, 32], "launch_s": 0, "skew": True}, llm=LLM, gpu=GPU)


def dense_us(tokens: int, rows: int) -> float:
    per_call = 1.0 + 0.01 * tokens
    return LAYERS * 8 * per_call + 2 * per_call + (2 * (10.0 + rows) if rows else 0.0)


@pytest.mark.parametrize(
    ("shape", "padded", "attention"),
    [
        (StepShape((), 1, 16, 1), 1, attention_us(0, 0, 1, 16)),
        (StepShape((), 5, 5 * 700, 5), 8, attention_us(0, 0, 5, 700)),
        (StepShape((), 33, 33 * 700, 33), 33, attention_us(0, 0, 33, 700)),  # beyond the captured sizes: no padding
        (StepShape(((100, 500),), 0, 0, 1), 100, attention_us(100, 500, 0, 0)),
        (StepShape(((20, 500),), 6, 6 * 333, 7), 32, attention_us(20, 500, 6, 333)),
        (StepShape(((20, 0), (100, 500)), 6, 6 * 333, 8), 126, attention_us(100, 500, 6, 333) + 0.02 * 4),
    ],
)
def test_a_step_is_the_sum_of_its_kernels(table, shape, padded, attention):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        assert table.step_s(shape) == pytest.approx((dense_us(padded, shape.logits_rows) + LAYERS * attention) * 1e-6, rel=1e-12)


def test_an_empty_step_costs_its_host_time(table):
    assert table.step_s(StepShape()) == 0.0
    assert table.run_s(StepShape(), 3) == [0.0] * 3


def test_a_long_chunk_is_priced_as_its_pieces(table):
    """Beyond the measured chunk the work of the pieces adds up; one launch is paid once."""
    with pytest.warns(ExtrapolationWarning, match="prefill_chunk = 500 lies outside"):
        seconds = table.step_s(StepShape(((500, 0),), 0, 0, 0))
    launch = attention_us(16, 0, 0, 0)
    attention = attention_us(256, 0, 0, 0) + attention_us(244, 256, 0, 0) - launch
    assert seconds == pytest.approx((dense_us(500, 0) + LAYERS * attention) * 1e-6, rel=1e-12)


def test_extrapolation_warns_once_and_is_kept(folder):
    model = build({"profile": str(folder), "capture_sizes": []}, llm=LLM, gpu=GPU)
    with pytest.warns(ExtrapolationWarning) as caught:
        for decodes in (20, 24, 30):
            model.step_s(StepShape((), decodes, 100 * decodes, decodes))
    assert len(caught) == 1
    (sentence,) = model.provenance()["extrapolated"]
    assert "n_decode = 30" in sentence and "up to 16" in sentence


def test_verifying_several_tokens_multiplies_rows_not_kv(table):
    one = table.step_s(StepShape((), 4, 4 * 300, 4))
    three = table.step_s(StepShape((), 4, 4 * 300, 12, query_tokens_per_decode=3))
    assert three - one == pytest.approx((dense_us(32, 12) - dense_us(8, 4)) * 1e-6)


@settings(max_examples=60, deadline=None)
@given(decodes=st.integers(1, 16), context=st.integers(1, 3000), steps=st.sampled_from([1, 2, 63, 64, 65, 200]), wide=st.sampled_from([1, 3]))
def test_a_run_is_its_steps_bit_for_bit(table, decodes, context, steps, wide):
    def shape(i: int) -> StepShape:
        return StepShape((), decodes, context + i * decodes, decodes * wide, wide)

    assert table.run_s(shape(0), steps) == [table.step_s(shape(i)) for i in range(steps)]


@settings(max_examples=60, deadline=None)
@given(contexts=st.lists(st.integers(1, 1500), min_size=1, max_size=16), steps=st.integers(1, 70))
def test_a_skewed_run_is_its_steps_bit_for_bit(skewed, contexts, steps):
    later = [skewed.step_s(Plan([context + i for context in contexts])) for i in range(steps)]
    assert skewed.run_s(Plan(contexts), steps) == later


@settings(max_examples=60, deadline=None)
@given(decodes=st.integers(1, 16), context=st.integers(0, 30000), more=st.integers(1, 5000))
def test_more_context_is_never_quicker(table, decodes, context, more):
    assert table.step_s(StepShape((), decodes, context + more, decodes)) >= table.step_s(StepShape((), decodes, context, decodes))


def test_skew_moves_towards_the_longest_and_jumps_where_the_kernel_stops_splitting(table, skewed):
    for contexts, alpha in (([100, 100, 100, 1300], 0.1), ([100] * 12 + [1300] * 4, 0.5)):
        n = len(contexts)
        mean, longest = table.step_s(StepShape((), n, sum(contexts), n)), table.step_s(StepShape((), n, 1300 * n, n))
        assert skewed.step_s(Plan(contexts)) == pytest.approx(mean + alpha * (longest - mean))
    equal = Plan([300] * 8)
    assert skewed.step_s(equal) == table.step_s(equal)
    assert skewed.needs_contexts and not table.needs_contexts


def test_skew_applies_to_mixed_batches(table, skewed):
    for chunk in ((64, 0), (64, 512), (200, 1024), (256, 1024)):
        mean = table.step_s(StepShape((chunk,), 4, 1600, 4))
        longest = table.step_s(StepShape((chunk,), 4, 5200, 4))
        expected = mean + skew_alpha(4, *chunk) * (longest - mean)
        assert skewed.step_s(Plan([100, 100, 100, 1300], (chunk,))) == pytest.approx(expected)


def test_skew_is_used_unasked_only_if_the_profile_says_that_it_is_its_own(tmp_path):
    folder = write_layerwise(tmp_path / "p")
    assert not build({"profile": str(folder)}, llm=LLM, gpu=GPU).needs_contexts
    (folder / "meta.yaml").write_text("skew_profile: {enabled: true}\n")
    assert build({"profile": str(folder)}, llm=LLM, gpu=GPU).needs_contexts
    assert not build({"profile": str(folder), "skew": False}, llm=LLM, gpu=GPU).needs_contexts


def test_a_fitted_offset_may_be_negative(folder, table):
    corrected = build({"profile": str(folder), "capture_sizes": [1, 8, 32], "launch_s": 0, "step_offset_s": -1e-5}, llm=LLM, gpu=GPU)
    shape = StepShape((), 5, 500, 5)
    assert corrected.step_s(shape) == pytest.approx(table.step_s(shape) - 1e-5)


def test_host_time_is_added_to_every_step(folder, table):
    hosted = build({"profile": str(folder), "capture_sizes": [1, 8, 32], "launch_s": 0, "host_step_s": 0.002, "host_sequence_s": 1e-4}, llm=LLM, gpu=GPU)
    for shape in (StepShape((), 5, 500, 5), StepShape(((20, 0),), 3, 100, 4)):
        sequences = shape.decodes + len(shape.chunks)
        assert hosted.step_s(shape) == pytest.approx(table.step_s(shape) + 0.002 + 1e-4 * sequences)


def test_a_layer_wise_profile_hides_the_catalogue_s_host_time(folder, table):
    assert build({"profile": str(folder), "capture_sizes": [1, 8, 32]}, llm=LLM, gpu=GPU).step_s(StepShape((), 5, 500, 5)) == table.step_s(
        StepShape((), 5, 500, 5)
    )


def test_a_step_without_a_graph_waits_for_its_launches(folder):
    """40 kernels at 1 ms each: eager is bound by launches, a graph is not, and padding costs less than either."""
    model = build({"profile": str(folder), "capture_sizes": [1, 2, 4, 8]}, llm=LLM, gpu=GPU)
    captured = build({"profile": str(folder), "capture_sizes": [1, 2, 4, 8, 12]}, llm=LLM, gpu=GPU)
    padded = build({"profile": str(folder), "capture_sizes": [1, 2, 4, 8, 16]}, llm=LLM, gpu=GPU)
    shape = StepShape((), 12, 12 * 100, 12)
    assert model.step_s(shape) == pytest.approx((LAYERS * 9 + 4) * 1e-3)
    assert model.step_s(shape) > 5 * padded.step_s(shape) > 5 * captured.step_s(shape)
    assert (model.path(shape), padded.path(shape)) == ((12, "eager"), (16, "graph"))
    assert model.run_s(shape, 70) == [model.step_s(shape)] * 70

@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "latency.profile: is missing"),
        ({"profil": "x"}, "latency.profil: unknown option .*did you mean 'profile'"),
        ({"profile": "/nowhere"}, "latency.profile: '/nowhere' is no folder"),
        ({"host_step_s": "3"}, "latency.host_step_s: must be a number of seconds"),
        ({"host_step_s": -1.0}, "latency.host_step_s: must be a number of seconds"),
        ({"launch_s": float("nan")}, "latency.launch_s: must be a number of seconds"),
        ({"capture_sizes": [0]}, "latency.capture_sizes"),
        ({"capture_largest": True}, "latency.capture_largest: must be a whole number"),
        ({"step_offset_s": float("inf")}, "latency.step_offset_s: must be a number of seconds"),
        ({"skew": "yes"}, "latency.skew: must be true or false"),
    ],
)
def test_options_are_checked(folder, options, message):
    given_options = options if not options or "profil" in options or "profile" in options else {"profile": str(folder), **options}
    with pytest.raises(InputError, match=message):
        build(given_options, llm=LLM, gpu=GPU)
