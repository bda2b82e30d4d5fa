"""Streamed weights, mixed precision, early exits: each against the pipeline, the sum or the count that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.early_exit import EarlyExit
from hwmodels.mixed_precision import MixedPrecision
from hwmodels.weight_streaming import LayerCache, WeightStreaming, streamed_layers
from serving.errors import InputError
from serving.plan import StepShape
from serving.scenario import load
from sim.fleet import resolve
from sim.run import simulate

DECODE = StepShape((), 8, 8000, 8)


class Flat:
    """``layer_s`` for each layer and sequence-independent ``fixed_s``; a little for every sequence and layer."""

    def __init__(self, layers: int, layer_s: float = 0.001, fixed_s: float = 0.002, sequence_s: float = 0.0) -> None:
        self.layers, self.layer_s, self.fixed_s, self.sequence_s = layers, layer_s, fixed_s, sequence_s

    def step_s(self, shape):
        return self.fixed_s + self.layers * (self.layer_s + self.sequence_s * shape.decodes)

    def run_s(self, shape, steps):
        return [self.step_s(shape)] * steps


def pipeline_period_s(layers: int, streamed: list[bool], layer_s: float, copy_s: float, steps: int = 60) -> float:
    """Run a copy stream and a compute stream layer by layer with two buffers; returns the time of a settled step."""
    computed_s = copied_s = 0.0
    freed: list[float] = [0.0, 0.0]  # when each buffer is free again
    ends = []
    for _ in range(steps):
        for layer in range(layers):
            if streamed[layer]:
                copied_s = max(copied_s, freed.pop(0)) + copy_s
                computed_s = max(computed_s, copied_s) + layer_s
                freed.append(computed_s)
            else:
                computed_s += layer_s
        ends.append(computed_s)
    return (ends[-1] - ends[steps // 2]) / (steps - 1 - steps // 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 12), st.integers(1, 6), st.floats(0.1, 3.0))
def test_a_step_takes_the_longer_of_computing_and_copying(groups, apart, ratio):
    layers = groups * apart
    streamed = [layer % apart == 0 for layer in range(layers)]
    expected = max(layers * 1.0, groups * ratio * apart)
    assert pipeline_period_s(layers, streamed, 1.0, ratio * apart) == pytest.approx(expected, rel=1e-9)
    model = WeightStreaming(Flat(layers, 1.0, 0.0), copies=groups, copy_s=ratio * apart, prefetch=True)
    assert model.step_s(DECODE) == pytest.approx(expected)


def test_without_prefetch_every_copy_is_waited_for():
    model = WeightStreaming(Flat(10, 1.0, 0.0), copies=4, copy_s=0.5, prefetch=False)
    assert model.step_s(DECODE) == 12.0 and model.run_s(DECODE, 3) == [12.0] * 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 80), st.floats(0.0, 1.0))
def test_in_a_scan_the_latest_used_is_useless_and_age_times_locality_keeps_all_it_can(layers, share):
    capacity = int(layers * share)
    assert streamed_layers(layers, capacity, "lru_ap") == layers - capacity
    assert streamed_layers(layers, capacity, "lru") == (0 if capacity == layers else layers)


def test_locality_lets_a_layer_that_is_used_often_stay():
    cache = LayerCache(2, "lru_ap")
    for _ in range(6):
        cache.use(0)
    for layer in (1, 2, 3, 0, 4, 5, 0):
        hit = cache.use(layer)
        assert hit == (layer == 0)
    assert cache._locality[0] == pytest.approx(0.1, abs=0.05) and max(cache._locality.values()) <= 0.9


def test_layers_of_two_dtypes_cost_their_shares():
    mixed = MixedPrecision([(0.25, Flat(8, 0.004)), (0.75, Flat(8, 0.001))])
    assert mixed.step_s(DECODE) == pytest.approx(0.002 + 2 * 0.004 + 6 * 0.001)
    assert mixed.run_s(DECODE, 2) == [mixed.step_s(DECODE)] * 2


def test_one_sequence_pays_for_the_layers_it_runs_and_a_batch_for_those_that_anybody_runs():
    exits = [(2, 0.5), (5, 0.3)]
    model = EarlyExit(Flat(8), Flat(1), 8, exits)
    assert model.mean_depth == pytest.approx(2 + 3 * 0.5 + 3 * 0.2)
    one = StepShape((), 1, 100, 1)
    assert model.step_s(one) == pytest.approx(0.002 + 0.001 * model.mean_depth)
    many = StepShape((), 200, 20_000, 200)
    assert model.step_s(many) == pytest.approx(0.002 + 0.001 * 8), "somebody always goes on"
    work = EarlyExit(Flat(8, 0.0, 0.0, 0.001), Flat(1, 0.0, 0.0, 0.001), 8, exits)
    assert work.step_s(many) == pytest.approx(200 * 0.001 * model.mean_depth)


def test_nobody_leaves_and_prompts_use_all_layers():
    stays = EarlyExit(Flat(8), Flat(1), 8, [(2, 0.0)])
    assert stays.step_s(DECODE) == pytest.approx(Flat(8).step_s(DECODE))
    leaves = EarlyExit(Flat(8), Flat(1), 8, [(2, 1.0)])
    mixed = StepShape(((64, 0),), 4, 400, 4)
    assert leaves.step_s(mixed) == Flat(8).step_s(mixed)
    assert leaves.run_s(DECODE, 3) == [leaves.step_s(DECODE)] * 3


def run(name: str, *overrides: str) -> dict:
    return simulate(load(name, ["workload.requests=60", *overrides]), saturated_rps=1.0).summary


def test_streaming_fits_what_does_not_and_costs_time_and_a_scan_ruins_lru():
    ahead, waiting, lru = (run("weight-streaming", option) for option in ("weights.streaming.prefetch=true", "weights.streaming.prefetch=false", "weights.streaming.cache=lru"))
    assert ahead["tpot_s"]["mean"] < waiting["tpot_s"]["mean"] < lru["tpot_s"]["mean"]
    half, most = (resolve(load("weight-streaming", [f"weights.streaming.resident={share}"])).capacity for share in (0.5, 0.9))
    assert half.weights_gib < most.weights_gib and half.blocks > most.blocks
    with pytest.raises(InputError, match="does not fit"):
        run("weight-streaming", "weights=null", "cluster.weight_dtype=bf16")


def test_mixed_precision_lies_between_its_parts():
    fp8, int4 = (run("mixed-precision", "weights=null", f"cluster.weight_dtype={dtype}") for dtype in ("fp8", "int4"))
    mixed = run("mixed-precision")
    assert int4["tpot_s"]["mean"] < mixed["tpot_s"]["mean"] < fp8["tpot_s"]["mean"]


def test_early_exits_pay_in_small_batches_and_hardly_in_large_ones():
    def gain(rate: float) -> float:
        early, whole = run("early-exit", f"workload.arrivals.rate_rps={rate}"), run("early-exit", "weights=null", f"workload.arrivals.rate_rps={rate}")
        return 1 - early["tpot_s"]["mean"] / whole["tpot_s"]["mean"]

    assert gain(0.1) > 0.3 > 0.15 > gain(30.0) > 0


@pytest.mark.parametrize(
    ("name", "overrides", "match"),
    [
        ("mixed-precision", "weights.mixed=[{dtype: fp8, layers: 3}]", "has 32"),
        ("early-exit", "weights.early_exit.exits=[{layer: 40, share: 0.1}]", "32 layers"),
        ("early-exit", "weights.early_exit.exits=[{layer: 9, share: 0.6}, {layer: 12, share: 0.6}]", "sum to 1"),
        ("weight-streaming", "cluster.pipeline_parallel=2", "pipeline"),
        ("weight-streaming", "weights.streaming.cache=lfu", "lru"),
    ],
)
def test_mistakes_are_named(name, overrides, match):
    with pytest.raises(InputError, match=match):
        run(name, overrides)


