"""Two ranks say what one says: shards add up to the network, logits agree, and the scheduler makes the same plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stub_plans import CPU, MOE, TINY

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.loader import random_weights
from engine.ranks import RankedRunner, Recipe
from engine.run import serve_scenario
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from engine.tensor_parallel import local_shape, shard
from serving.errors import InputError
from serving.records import open_run
from serving.scenario import load

SHARED = replace(MOE, shared_intermediate=32, qkv_bias=True, qk_norm=True)
OPTIONS = RunnerOptions(blocks=40, block_tokens=4, max_seqs=8, max_batch_tokens=64)


def steps() -> list[StepInput]:
    first, second = list(range(1, 24)), list(range(30, 41))
    tables = {1: [3, 9, 4, 17, 5, 6, 30], 2: [8, 2, 11, 12]}
    return [
        StepInput([SequenceInput(1, first[:10], 0, tables[1], 10), SequenceInput(2, second, 0, tables[2], 11)]),
        StepInput([SequenceInput(1, first[10:], 10, tables[1], 13), SequenceInput(2, [7], 11, tables[2])]),
        StepInput([SequenceInput(2, [9], 12, tables[2]), SequenceInput(1, [3], 23, tables[1])]),
    ]


def logits_of(runner: Runner, execute) -> list[torch.Tensor]:
    found = []
    forward = runner._forward
    runner._forward = lambda layout, path: found.append(forward(layout, path)) or found[-1]
    for batch in steps():
        execute(batch)
    return found


@pytest.mark.parametrize("shape", [TINY, SHARED], ids=["dense", "experts, biases and norms"])
def test_partial_sums_of_the_shards_are_the_whole_matrix(shape):
    weights = random_weights(shape, 5, device=CPU, dtype=torch.float64)
    parts = [shard(shape, weights, rank, 2) for rank in range(2)]
    x = torch.randn(3, shape.hidden, dtype=torch.float64)
    for index, layer in enumerate(weights.layers):
        heads = [part.layers[index].qkv for part in parts]
        assert sum(one.shape[0] for one in heads) == layer.qkv.shape[0]
        wide = torch.randn(3, layer.output.shape[1], dtype=torch.float64)
        partial = sum(part.layers[index].output @ piece.T for part, piece in zip(parts, wide.chunk(2, dim=1)))
        assert torch.allclose(partial, layer.output @ wide.T)
        if layer.down is not None:
            halves = [part.layers[index].gate_up @ x.T for part in parts]
            gate, up = (torch.cat([half.chunk(2)[side] for half in halves]) for side in range(2))
            assert torch.equal(torch.cat((gate, up)), layer.gate_up @ x.T)


def test_logits_of_two_ranks_are_those_of_one():
    weights = random_weights(SHARED, 5, device=CPU, dtype=torch.float32)
    one = Runner(SHARED, weights, OPTIONS)
    expected = logits_of(one, one.execute)
    ranked = RankedRunner(Recipe(SHARED, torch.float32, 5), weights, OPTIONS, 2)
    try:
        assert ranked.runner.cache.keys[0].shape[2] == SHARED.kv_heads // 2
        found = logits_of(ranked.runner, ranked.execute)
    finally:
        ranked.close()
    for was, now in zip(expected, found):
        assert (was - now).abs().max() < 1e-4 * was.abs().max()


@pytest.mark.parametrize("more", [[], ["speculation={policy: {name: fixed, tokens: 3}, acceptance: 0.5}", "workload.requests=5"]], ids=["plain", "drafts"])
def test_the_same_plans_and_the_same_words(more, tmp_path):
    texts = []
    for ranks in (1, 2):
        spec = load("engine-tiny", ["workload.requests=10", f"cluster.tensor_parallel={ranks}", *more])
        engine = build_engine(spec, Choices(device="cpu", attention="torch"))
        said: dict[int, list[int]] = {}

        def keep(loop, said=said):
            take_out = loop._take_out
            loop._take_out = lambda request_id: (said.__setitem__(request_id, list(loop.streams[request_id].tokens)), take_out(request_id))

        try:
            serve_scenario(spec, engine, even_clock(), out=tmp_path / str(ranks), prepare=keep)
        finally:
            if ranks > 1:
                engine.runner.close()
        texts.append(said)
    assert texts[0] == texts[1]
    plans = [open_run(tmp_path / str(ranks)).plans.to_json() for ranks in (1, 2)]
    assert plans[0] == plans[1] and len(plans[0]) > 1000
    if more:
        with pytest.raises(InputError, match="drafts on one device"):
            build_engine(load("engine-tiny", ["cluster.tensor_parallel=2", *more, "speculation.proposer=layers"]), Choices(device="cpu", attention="torch"))


def even_clock() -> ReportedClock:
    """Every step takes as long as the last, so that plans can only differ by what the scheduler was told."""
    clock = ReportedClock()
    lap = clock.lap
    clock.lap = lambda begin_s, output: lap(begin_s, output)._replace(duration_s=0.01)
    return clock


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (replace(TINY, kv_heads=1), "KV heads"),
        (replace(TINY, intermediate=47), "feed-forward"),
        (replace(TINY, positions="alibi"), "rotary"),
        (replace(MOE, expert_intermediate=23), "experts"),
    ],
)
def test_what_cannot_be_split_is_named(shape, match):
    with pytest.raises(InputError, match=match):
        local_shape(shape, 2)
