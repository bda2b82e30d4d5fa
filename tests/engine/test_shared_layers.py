"""Layers that read an earlier layer's keys and values: fewer pages, the simulator's policy, and how alike layers are."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stub_plans import CPU, TINY, runner
from test_loop import BURST, scenario, serve

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.layer_similarity import neighbour_cosines, state_cosines
from engine.loader import random_weights
from engine.run import serve_scenario
from serving.errors import InputError
from serving.scenario import load
from validate.parity import parity
from validate.rerun import differences

REUSE = "kv_cache.layer_reuse={{policy: {{name: threshold, cosine: 0.9, group: 2}}, similarity: {}, source: made up}}"
TEXTS = [[1, 5, 9, 4, 4, 60, 7], [3, 3, 8]]


def test_pages_are_kept_once_for_those_who_share():
    shape = replace(TINY, layers=4, kv_owners=(0, 0, 2, 2))
    shared, own = runner(shape), runner(replace(TINY, layers=4))
    assert shared.cache.bytes() * 2 == own.cache.bytes() and shape.kv_bytes_per_token(4) * 2 == own.shape.kv_bytes_per_token(4)
    assert shared.cache.keys[1] is shared.cache.keys[0] and shared.cache.values[3] is shared.cache.values[2]


def test_a_scenario_of_sharing_layers_runs_on_more_pages_and_has_parity(tmp_path):
    base = ["workload.requests=16", "workload.arrivals=all_at_once", "kv_cache.blocks=22", "kv_cache.tiers=[{name: host, gib: 0.02, read_bytes_per_s: 1.0e+10}]"]
    spec = load("engine-tiny", [*base, REUSE.format("[0.95, 0.1, 0.99]")])
    engine = build_engine(spec, Choices(device="cpu"))
    assert engine.runner.shape.kv_owners == (0, 0, 2, 2)
    summary = serve_scenario(spec, engine, ReportedClock(), out=tmp_path / "run").summary
    assert summary["requests"]["completed"] == 16 and summary["preemptions"] > 0 and engine.runner.host_pages.copied_in > 0
    assert parity(tmp_path / "run").differing_plans == 0
    assert differences(tmp_path / "run", stepwise=True) == []
    with pytest.raises(InputError, match="3 cosines between neighbours, got 2"):
        build_engine(load("engine-tiny", [REUSE.format("[0.95, 0.1]")]), Choices(device="cpu"))
    with pytest.raises(InputError, match="on one device and without adapters"):
        build_engine(load("engine-tiny", [REUSE.format("[0.95, 0.1, 0.1]"), "adapters={slots: 2}"]), Choices(device="cpu"))


def test_the_text_does_not_depend_on_the_pool():
    shape = replace(TINY, layers=3, vocab=1009, kv_owners=(0, 1, 1))
    sizes = {"max_seqs": 16, "max_batch_tokens": 64}
    said = [serve(scenario(blocks=blocks, requests=16, **BURST), runner(shape, blocks=blocks, graph_sizes=(4, 16), **sizes)) for blocks in (400, 30)]
    assert said[0][1] == said[1][1] and said[1][0]["preemptions"] > 0
    alone = serve(scenario(blocks=400, requests=16, **BURST), runner(replace(shape, kv_owners=()), blocks=400, **sizes))
    assert alone[1] != said[0][1]


def test_layers_that_see_the_same_with_the_same_projection_are_alike():
    weights = random_weights(replace(TINY, layers=4), 3, device=CPU, dtype=torch.float32)
    weights.layers[0].output.zero_(), weights.layers[0].down.zero_()  # the first layer passes on what came
    weights.layers[1].qkv = weights.layers[0].qkv.clone()
    weights.layers[2].qkv = -weights.layers[1].qkv
    engine = runner(replace(TINY, layers=4), weights=weights, max_batch_tokens=4)
    first, second, third = neighbour_cosines(engine, TEXTS)
    assert first == pytest.approx(1.0, abs=1e-5) and second < -0.1 and abs(third) < 0.2
    states = state_cosines(engine.shape, weights, TEXTS)
    assert states[0] == pytest.approx(1.0, abs=1e-5) and states[0] > max(states[1:])
