"""Dropped pages in the engine: what is left is attended to exactly, whatever was written where the others were."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

import plain_forward
from stub_plans import CPU, TINY, runner

from engine.attention_trace import AttentionTrace
from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.loader import random_weights
from engine.run import serve_scenario
from engine.step import SequenceInput, StepInput
from serving.errors import InputError
from serving.policies.retention.window import Window
from serving.scenario import load
from validate.parity import parity

WIDTH = 4


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_attention_over_what_is_left_is_that_of_a_masked_forward_pass(attention):
    weights = random_weights(TINY, 6, device=CPU, dtype=torch.float32)
    engine = runner(weights=weights, block_tokens=WIDTH, attention=attention)
    counts = (9, 10, *[1] * (15 if attention == "torch" else 5))  # Triton's interpreter takes its time
    text = [random.Random(2).randrange(TINY.vocab) for _ in range(sum(counts))]
    policy = Window(window_blocks=3, sink_blocks=1)
    table, kept_pages, free = [], [], list(range(63, 0, -1))
    kept = torch.zeros(len(text), len(text), dtype=torch.bool)
    rows, start = [], 0
    forward = engine._forward
    engine._forward = lambda layout, path: rows.append(forward(layout, path)) or rows[-1]
    for count in counts:
        while len(table) + start // WIDTH - len(kept_pages) < 0 or kept_pages[-1:] != [(start + count - 1) // WIDTH]:
            kept_pages.append(kept_pages[-1] + 1 if kept_pages else 0)
            table.append(free.pop())
        seen = [page * WIDTH + offset for page in kept_pages for offset in range(WIDTH)]
        for position in range(start, start + count):
            kept[position, [at for at in seen if at <= position]] = True
        dropped = ((start + count - 1) // WIDTH + 1 - len(table)) * WIDTH
        entry = SequenceInput(1, text[start : start + count], start, list(table), count, dropped=dropped)
        engine.execute(StepInput([entry]))
        start += count
        for position in reversed(policy.drop(len(table), 0, None)):
            gone = table.pop(position)
            kept_pages.pop(position)
            for pages in engine.cache.keys + engine.cache.values:
                pages[gone] = 1e4  # whoever reads it will show
    expected = plain_forward.logits(plain_forward.weights_of(weights, TINY), TINY, text, kept)
    assert (torch.cat(rows).double() - expected).abs().max() < 1e-4
    assert not kept[-1].all() and kept[-1].sum() <= 4 * WIDTH + WIDTH


def tiny(*overrides: str):
    plain = ["workload.requests=14", "kv_cache.prefix_caching=false", "kv_cache.blocks=40"]
    return load("engine-tiny", [*plain, *overrides])


def test_a_run_with_a_window_holds_little_and_has_decision_parity(tmp_path):
    spec = tiny("retention.policy={name: window, window_blocks: 2, sink_blocks: 1}")
    loops = []
    result = serve_scenario(spec, build_engine(spec, Choices(device="cpu", attention="torch")), ReportedClock(), out=tmp_path / "run", prepare=loops.append)
    assert result.summary["requests"]["completed"] == 14
    pool = loops[0].scheduler.pool
    assert loops[0].scheduler.dropped_blocks > 20 and pool.free == pool.total
    assert parity(tmp_path / "run").differing_plans == 0


def test_the_engine_measures_the_entropy_that_truncation_asks_for():
    loops = []
    spec = tiny("retention.policy={name: entropy, threshold: 0.999, steps: 2, window_blocks: 2}")
    engine = build_engine(spec, Choices(device="cpu", attention="torch"))
    result = serve_scenario(spec, engine, ReportedClock(), prepare=loops.append)
    assert result.summary["requests"]["completed"] == 14
    assert loops[0].scheduler.dropped_blocks > 0
    never = tiny("retention.policy={name: entropy, threshold: 0.001, steps: 2, window_blocks: 2}")
    serve_scenario(never, engine, ReportedClock(), prepare=loops.append)
    assert loops[1].scheduler.dropped_blocks == 0


def test_spread_is_the_entropy_over_its_maximum():
    trace = AttentionTrace(keep=False)
    engine = runner(trace=trace)
    output = engine.execute(StepInput([SequenceInput(7, list(range(1, 12)), 0, [1, 2, 3])]))
    assert 0.0 < output.entropy[7] <= 1.0 and not trace.tokens
    assert engine.execute(StepInput([SequenceInput(8, [5], 0, [9])])).entropy[8] == 0.0


def test_networks_with_windows_of_their_own_are_refused():
    with pytest.raises(InputError, match="retention"):
        build_engine(tiny("retention.policy=window", "cluster.tensor_parallel=2"), Choices(device="cpu", attention="torch"))
